"""Documents per second with environments that sleep, hang, exit, flood and write garbage, beside healthy ones.

    python benchmarks/tails.py [--episodes 256 --documents 256 --turns 8 --timeout 20 --share 0.0625 --rounds 2]

Real processes play the episodes. A server in memory answers at once, and the trainer only counts, so that what is
measured is the order of documents, the limits and the processes. Healthy and unhealthy runs take turns, since other
work on the machine slows both. An episode that hangs holds up its step: a step should last as long as its timeout.

`bound` is what the unhealthy episodes cost wherever they are played: the mean seconds of a document if all are healthy,
by those with the seconds of episodes that hang until they are cut, and of those that are lost and played anew.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tails_environment import KINDS

from truestep.environments.episodes.service import EpisodeService
from truestep.environments.process import WorkerOptions
from truestep.environments.prompts import Prompt
from truestep.generate.environment import EnvironmentPlay, EpisodeLimits
from truestep.generate.generator import Completion, DrawOptions, Request
from truestep.generate.group_maker import GroupOptions
from truestep.generate.servers.look_ahead import StalenessLimit
from truestep.generate.servers.probe import TEMPERATURE, Expected
from truestep.generate.servers.protocol import Description, InferenceServer
from truestep.generate.servers.servers import Servers
from truestep.generate.servers.source import ServerSource
from truestep.types import Rejected, Rollout

VOCABULARY, STOP = 64, 0


@dataclass(frozen=True)
class Setting:
    episodes: int  # at once
    documents: int  # of a step
    group_size: int
    turns: int
    sleep: float  # at most, in seconds a turn
    timeout: float  # of an episode, in seconds
    share: float  # of episodes that are unhealthy
    steps_ahead: int


def scores(temperature: float) -> np.ndarray:
    logits = np.random.default_rng(0).normal(size=VOCABULARY) * 3 / temperature
    return (logits - np.log(np.exp(logits).sum())).astype(np.float32)


class Instant(InferenceServer):
    """Answers at once, always the same."""

    url, model = "memory", "policy"

    async def describe(self) -> Description:
        return Description((self.model,), 4096, VOCABULARY)

    async def complete(self, request: Request, n: int) -> list[Completion]:
        await asyncio.sleep(0.02)
        return [Completion([5, 6, STOP], [-1.0] * 3, stopped=True) for _ in range(n)]

    async def next_token(
        self, prompt: tuple[int, ...], temperature: float, count: int, *, past_the_cache: bool = False
    ) -> dict[int, float]:
        known = scores(temperature)
        return {int(token): float(known[token]) for token in known.argsort()[-count:]}

    async def pause(self, mode: str) -> None: ...

    async def load(self, weights: Path) -> None: ...

    async def resume(self) -> None: ...

    async def close(self) -> None: ...


class Numbers:
    """A tokenizer whose words are numbers."""

    chat_template, all_special_ids, all_special_tokens = None, (), ()
    added_tokens_decoder: dict[int, Any] = {}  # noqa: RUF012

    def __len__(self) -> int:
        return VOCABULARY

    def decode(self, ids: Sequence[int], **options: Any) -> str:
        return " ".join(map(str, ids))


class NoFiles:
    """In the place of a publisher: the server reads no weights."""

    def close(self, finished: bool) -> None: ...


@dataclass
class Run:
    """What a run trained on and rejected, and when each step had its documents."""

    documents: list[Rollout] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    still_open: list[int] = field(default_factory=list)  # groups

    def per_second(self, warm: int) -> float:
        """Documents per second, from the end of step `warm`."""
        steps = len(self.times)
        return len(self.documents) / steps * (steps - warm) / (self.times[-1] - self.times[warm - 1])


def run(setting: Setting, steps: int, say: Callable[[str], None] | None = None) -> Run:
    options = {"turns": setting.turns, "sleep": setting.sleep, "share": setting.share}
    worker = WorkerOptions("tails_environment:Unsteady", 60.0, 2**32)
    service = EpisodeService(worker, 2, options, say)
    sampling = GroupOptions(setting.group_size, 0, DrawOptions(1.0, 8, frozenset({STOP})))
    prompts = [Prompt(f"p{number}", "", {}, (3, 4)) for number in range(64)]
    ahead = setting.steps_ahead * setting.documents
    servers = Servers(
        prompts=prompts,
        make_servers=lambda: [Instant()],
        plays=EnvironmentPlay(service, Numbers(), EpisodeLimits(100, 4096, setting.timeout)),
        sampling=sampling,
        vocabulary_size=VOCABULARY,
        limit=StalenessLimit(
            setting.documents, setting.documents, ahead, setting.episodes // setting.group_size, 600.0
        ),
        publisher=NoFiles(),  # type: ignore[arg-type]
        pause="wait",
        tolerance=0.01,
    )
    source = ServerSource(servers, prompts=prompts, sampling=sampling, advantage_rule="group_mean")
    made, seen = Run(), 0
    try:
        for _ in range(steps):
            rows = [np.stack([scores(temperature)] * len(servers.probes)) for temperature in (TEMPERATURE, 1.0)]
            expected = Expected(seen, servers.probes, rows[0], rows[1])
            servers.send(Path("weights"), expected, fence=lambda: None)
            servers.wait_until_sent()
            taken = source.take(setting.documents, seen)
            made.times.append(time.monotonic())
            made.documents += taken.documents
            made.rejected += taken.rejected
            seen += setting.documents
        made.still_open = list(source.state()["open"])
        made.rejected += source.aside().rejected
    finally:
        servers.close(finished=True)
    return made


def kind_of(reason: str) -> str:
    """Return which kind of unhealthy episode a reason names."""
    if "exit code 7" in reason:
        return "exit"
    return "flood" if "at most" in reason and "bytes" in reason else "garbage"


def bound(setting: Setting) -> float:
    """Return the highest throughput beside that of healthy episodes, where seconds of episodes alone count."""
    whole, turn = setting.turns * setting.sleep / 2, setting.sleep / 2
    part = turn * (setting.turns + 1) / 2  # until the turn at which it shows
    each = setting.share / len(KINDS)
    lost = 3 * each
    seconds = (1 - setting.share) * whole + each * setting.timeout + lost * part
    return whole / (seconds / (1 - lost))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--documents", type=int, help="of a step; as many as episodes without it")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--sleep", type=float, default=2.0)
    parser.add_argument("--timeout", type=float, default=20.0)
    parser.add_argument("--share", type=float, default=0.0625)
    parser.add_argument("--ahead", type=int, nargs="+", default=[2, 0])
    parser.add_argument("--warm", type=int, default=3, help="steps before the measurement")
    parser.add_argument("--steps", type=int, default=9, help="steps measured")
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    for ahead in given.ahead:
        found: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(given.rounds):
            for healthy in (True, False):
                share = 0.0 if healthy else given.share
                documents = given.documents or given.episodes
                setting = Setting(
                    given.episodes, documents, given.group_size, given.turns, given.sleep, given.timeout, share, ahead
                )
                made = run(setting, given.warm + given.steps)
                found[healthy].append(made.per_second(given.warm))
                ended = Counter(str(document.metadata["ended_by"]) for document in made.documents)
                lost = Counter(kind_of(rejected.reason) for rejected in made.rejected)
                print(
                    f"{ahead} steps ahead, {'healthy' if healthy else 'unhealthy':9} {found[healthy][-1]:6.2f} "
                    f"documents/s; ended by {dict(ended)}; lost {dict(lost)}; load {os.getloadavg()[0]:.1f}",
                    flush=True,
                )
        both = {healthy: statistics.mean(values) for healthy, values in found.items()}
        print(f"{ahead} steps ahead: {both[False] / both[True]:.1%} of healthy; bound {bound(setting):.1%}", flush=True)


if __name__ == "__main__":
    main()
