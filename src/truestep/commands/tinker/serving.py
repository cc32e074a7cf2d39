"""Serves the protocol together with the endpoint of `truestep serve`."""

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from truestep.commands.tinker.checkpoints import Checkpoints
from truestep.commands.tinker.jobs import Jobs
from truestep.commands.tinker.journal import Journal
from truestep.commands.tinker.orders import Orders
from truestep.commands.tinker.requests import Model
from truestep.commands.tinker.restart import restart
from truestep.commands.tinker.state import State
from truestep.commands.tinker.tenants import Tenants
from truestep.commands.tinker.usage import Counts, shown, summed
from truestep.config.schema import Config
from truestep.errors import TruestepError
from truestep.generate.read import stop_ids
from truestep.model.policy import Policy
from truestep.run.assemble.policy import make_policy
from truestep.weights.digests import Run, digest

_LOOK_SECONDS = 30.0  # seconds between checks for sessions with silent clients
_SWEEP_SECONDS = 600.0  # seconds between removals of expired checkpoints
_END_SECONDS = 10.0  # seconds to wait at the end for what is being written


class TinkerError(TruestepError):
    pass


def _computes(config: Config, policy: Policy) -> str:
    """Return a digest of the base model's weights and of the options that change what is computed from them."""
    options = config.model.model_dump(mode="json", exclude={"path"})
    found: list[object] = [options, config.deterministic, config.data.tokens_per_microbatch]
    for name, weight in policy.weights.frozen.items():
        found.append((name, str(weight.dtype), int(digest(weight, Run(0, 1, weight.numel(), 0)))))
    return sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:32]


@dataclass
class Tinker:
    """Serves the protocol, with checkpoints in a directory."""

    directory: Path
    keys: Path | None = None
    name: str | None = None  # name of the base model; None: the last part of its path
    state: State = field(default_factory=State)
    now: Callable[[], float] = time.monotonic
    say: Callable[[str], None] = lambda text: None  # shows a line in the terminal

    def __post_init__(self) -> None:
        self.tenants, self.state.quota = Tenants(self.keys), lambda tenant: self.tenants.quota(tenant)
        self._looked = self._swept = self.now()
        self._said = Counts()

    def begin(self, config: Config, policy: Policy, longest: int) -> list[Any]:
        """Return the routes to add to the server. `policy`: the base model. The endpoint samples from it at the same
        time."""
        from truestep.commands.tinker.app import Served, routes

        if policy.weights.ranks.size > 1:
            raise TinkerError("--tinker: the protocol is served by one process, not under torchrun")
        if policy.adapter is not None or policy.weights.master:
            raise TinkerError("--tinker: the base model is model.path itself: leave out --weights")
        longest = min(longest, config.data.tokens_per_microbatch)
        path = Path(config.model.path)
        name = self.name or path.name
        checkpoints, fits = Checkpoints(self.directory), Model(policy.vocabulary_size, longest, stop_ids(policy))
        journal, orders = Journal(self.directory / "live"), Orders(fits)
        self.state.journal, self.state.base = journal, str(path.absolute())
        self.state.computes = _computes(config, policy)
        checkpoints.recover(restart(self.state, journal, orders))
        base = make_policy(config, policy.weights.ranks, frozen=True, base=policy)
        self._jobs = Jobs(config, base, checkpoints, self.state)
        served = Served(
            name,
            (name, str(path), str(path.absolute())),
            self.name or str(path.absolute()),
            fits,
            orders,
            policy.tokenizer is not None,
            self.tenants,
            self.state,
            checkpoints,
        )
        return list(routes(served))

    async def run(self) -> None:
        """Compute jobs until the task is cancelled."""
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(changed.set)

        self.state.wake = wake
        try:
            while True:
                changed.clear()
                if self.turn():
                    await asyncio.sleep(0)
                    continue
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), _LOOK_SECONDS)
        finally:
            if not self.state.writes.stop(_END_SECONDS):
                self.say("the disk stands still: what is being written is computed again by the next server")

    def turn(self) -> bool:
        """Compute the next jobs. Return whether there were any."""
        now = self.now()
        if now - self._looked >= _LOOK_SECONDS:
            self._show(now - self._looked)
            self._looked = now
            self.state.end_silent()
        while self.state.ended:
            self._jobs.free(self.state.ended.popleft())
        if taken := self.state.take():
            self._jobs.run(taken)
            self.state.busy += self.now() - now
        elif now - self._swept >= _SWEEP_SECONDS:
            self._swept = now
            self._jobs.sweep()
        return bool(taken)

    def _show(self, seconds: float) -> None:
        """Say in the terminal what was done since the last time, if anything was."""
        has, counts, _ = self.state.used()
        total = summed(counts)
        if total != self._said:
            self.say(", ".join(shown(has, self._said, total, seconds)))
            self._said = total
