"""A server source with servers in memory on a virtual clock, and the proof of what it gave."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from server.fake import (
    STARTED_WITH,
    VOCABULARY,
    FakeRewards,
    FakeServer,
    completion_of,
    expected,
    labels,
    make_prompts,
    read,
    weights_of,
)
from server.virtual import VirtualThread
from truestep.environments.prompts import Prompt
from truestep.generate.generator import DrawOptions
from truestep.generate.group_maker import GroupOptions
from truestep.generate.order import OrderOptions
from truestep.generate.play import Plays, SingleTurn
from truestep.generate.servers import shared
from truestep.generate.servers.look_ahead import StalenessLimit
from truestep.generate.servers.servers import Servers
from truestep.generate.servers.shared import SharedServers, SharedServerSource
from truestep.generate.servers.source import ServerSource
from truestep.ranks.group import ALONE
from truestep.rollouts.source import Taken
from truestep.types import PutAside, Rejected, Rollout

GROUP, STEP = 2, 4  # documents


@dataclass
class FakeWeights:
    """In the place of `Publisher`: what is written gets the next number."""

    versions: dict[int, int] = field(default_factory=dict)  # by number
    cleared: bool = False

    def write(self, policy: Any, version: int) -> Path:
        number = len(self.versions)
        self.versions[number] = version
        policy.number = number
        return Path(str(number))

    def close(self, finished: bool) -> None:
        self.cleared |= finished


@dataclass
class Run:
    """A trainer that only counts: it takes documents, is busy for a while, and has new weights."""

    servers: Sequence[FakeServer]
    pause: str = "wait"
    max_staleness: int = 0
    concurrency: int = 8
    stall_timeout: float = 1000.0
    rewards: FakeRewards = field(default_factory=FakeRewards)
    stop_at_rejected: bool = False
    busy: float = 1.0
    weights: FakeWeights = field(default_factory=FakeWeights)
    seed: int = 0
    replace_limit: int = 0
    group_size: int = GROUP
    docs_per_step: int = STEP
    max_new_tokens: int = 6
    prompts: Sequence[Prompt] = field(default_factory=make_prompts)
    order: OrderOptions = field(default_factory=OrderOptions)
    plays: Plays | None = None  # None: episodes of one turn, which `rewards` rates

    def __post_init__(self) -> None:
        self.thread = VirtualThread()
        self.seen = 0
        self.steps: list[list[Rollout]] = []
        self.first_number = len(self.weights.versions)
        self.closed = False
        self.measured: dict[str, float] = {}  # of the last step
        self._rejected: list[Rejected] = []
        self._put_aside: list[PutAside] = []
        self._policy: Any = SimpleNamespace(weights=SimpleNamespace(ranks=ALONE))
        with self._patched():
            draw = DrawOptions(0.8, self.max_new_tokens, frozenset({0}))
            sampling = GroupOptions(
                self.group_size, self.seed, draw, self.stop_at_rejected, anew_at_once=True, order=self.order
            )
            step = self.docs_per_step
            self.talking = Servers(
                prompts=self.prompts,
                make_servers=lambda: self.servers,
                plays=self.plays or SingleTurn(self.rewards, read),
                sampling=sampling,
                vocabulary_size=VOCABULARY,
                limit=StalenessLimit(step, step, self.max_staleness, self.concurrency, self.stall_timeout),
                publisher=self.weights,  # type: ignore[arg-type]
                pause=self.pause,
                tolerance=0.01,
                loop=self.thread,
            )
            self.shared = SharedServers(self.talking, self._policy, self.weights)  # type: ignore[arg-type]
            made = ServerSource(
                self.talking,
                prompts=self.prompts,
                sampling=sampling,
                advantage_rule="group_mean",
                replace_limit=self.replace_limit,
            )
            self.source = SharedServerSource(made, self.shared, self._policy)
        self.source.put_rejected = self._rejected.extend
        self.snapshot = self.source.snapshot()
        self.ahead = self.talking.ahead

    def _patched(self) -> Any:
        """The policy's log-probs are those of the number that its weights were written under."""
        return mock.patch.object(shared, "expect", lambda policy, probes, version: expected(policy.number, version))

    def step(self) -> list[Rollout]:
        with self._patched():
            taken = self.source.take(self.docs_per_step, self.seen)
            self.snapshot = self.source.snapshot()
            self._hear(taken)
            self.measured = dict(taken.measured)
            documents = list(taken.documents)
            self.check(documents)
            self.steps.append(documents)
            self.thread.advance(self.busy)
            self.seen += self.docs_per_step
            self.shared.updated(len(self.steps), self.seen)
        return documents

    def _hear(self, taken: Taken) -> None:
        self._rejected += taken.rejected
        self._put_aside += taken.put_aside

    def rejected(self) -> list[Rejected]:
        """What was refused since the last call, also if no step has taken anything since."""
        if not self.closed:
            self._hear(self.source.aside())
        rejected, self._rejected = self._rejected, []
        return rejected

    def put_aside(self) -> list[PutAside]:
        """What steps have put aside since the last call: what the ledger has."""
        put_aside, self._put_aside = self._put_aside, []
        return put_aside

    def run(self, steps: int) -> Run:
        for _ in range(steps):
            self.step()
        return self

    def close(self, finished: bool = True) -> None:
        if not self.closed:
            self._rejected += self.source.aside().rejected
        self.closed = True
        self.source.close(finished)

    def check(self, documents: Sequence[Rollout]) -> None:
        """Whatever happened to the servers, this holds of every document that is trained on."""
        assert len(documents) == self.docs_per_step
        groups: dict[str, list[Rollout]] = defaultdict(list)
        for document in documents:
            groups[str(document.group_id)].append(document)
            versions = labels(document, document.model_version).tolist()
            made_by = weights_of(document)
            assert versions == [self.weights.versions[number] for number in made_by], "each token's true version"
            assert min(made_by) >= self.first_number, "of this trainer's weights, not of one before it"
            assert all(0 <= self.seen - version <= self.max_staleness for version in versions)
            assert len(set(versions)) == 1 or self.pause == "keep"
            self._check_probed(document, made_by)
        assert {len(members) for members in groups.values()} == {self.group_size}, "groups are whole"
        for number, members in groups.items():
            assert {document.id.split("-")[0] for document in members} == {number}
            assert abs(sum(float(member.advantages[-1]) for member in members if member.advantages is not None)) < 1e-4
        names = [document.id for step in [*self.steps, documents] for document in step]
        assert len(set(names)) == len(names), "no document twice"

    def _check_probed(self, document: Rollout, made_by: Sequence[int]) -> None:
        """A right probe began after the completion had ended."""
        number = completion_of(document)
        (server,) = [server for server in self.servers if server.url == document.metadata["server"]]
        ended = server.sampled[number].ended
        assert any(began > ended and made_by[-1] <= weights != STARTED_WITH for began, weights in server.probes)

    @property
    def group_numbers(self) -> list[list[int]]:
        return [list(dict.fromkeys(int(str(document.group_id)) for document in step)) for step in self.steps]
