"""Access of all ranks to the inference servers: the first rank talks to them, and all ranks publish weights
together."""

from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from truestep.generate.generator import Completion, Generate, Request
from truestep.generate.servers.probe import expect
from truestep.generate.servers.servers import Servers
from truestep.generate.servers.weight_files import Publisher
from truestep.metrics.observers import Observer
from truestep.model.policy import Policy
from truestep.rollouts.shared import SharedSource
from truestep.rollouts.source import Source, Taken
from truestep.types import Rollout

T = TypeVar("T")
R = TypeVar("R")


class SharedServers(Observer):
    """A `Generator`: the servers on each rank. It publishes the policy's weights before the first request to the
    servers, and then after each update. All ranks write their shards and score the probes together; no rank needs the
    whole model."""

    def __init__(
        self,
        servers: Servers | None,
        policy: Policy,
        publisher: Publisher,
        fence: Callable[[], None] = lambda: None,
    ):
        """Share `servers`, which is None on every rank but the first. `fence` raises if another process trains the
        run."""
        self._servers, self._policy, self._publisher = servers, policy, publisher
        self._ranks = policy.weights.ranks
        self._probes = self._ranks.share(lambda: self._of_first_rank.probes)
        self._published, self._fence = False, fence

    @property
    def _of_first_rank(self) -> Servers:
        assert self._servers is not None
        return self._servers

    def ready(self, documents_seen: int) -> None:
        """Publish the policy's weights if none were published yet. `documents_seen` is their version."""
        if not self._published:
            self.publish(documents_seen)

    def updated(self, step: int, documents_seen: int) -> None:
        if self._published:
            self.publish(documents_seen)

    def publish(self, version: int) -> None:
        self._published = True
        self._ranks.share(self._before_writing)
        weights = self._publisher.write(self._policy, version)
        expected = expect(self._policy, self._probes, version)
        self._ranks.share(lambda: self._of_first_rank.send(weights, expected, self._fence))

    def _before_writing(self) -> None:
        self._of_first_rank.wait_until_sent()
        self._fence()

    @property
    def generate(self) -> Generate:
        return self._of_first_rank.ahead.fleet.generate

    def ask(self, request: Request) -> Future[Completion]:
        """Ask for a completion, from any thread of the first rank. Weights must have been published."""
        return self._of_first_rank.ask(request)

    def weights(self, version: int) -> None:
        self.ready(version)

    def map(
        self,
        items: Sequence[T],
        work: Callable[[T, Generate], Coroutine[Any, Any, R]],
        asked_to_stop: Callable[[], bool],
    ) -> list[R]:
        """Run `work` for all items on the first rank, with the current weights. Every rank gets all results."""
        return self._ranks.share(lambda: self._of_first_rank.map(items, work, asked_to_stop))

    def arrived(self) -> list[Rollout]:
        """Return the completions that arrived since the last call, to be compared with the policy."""
        return self._ranks.share(lambda: self._of_first_rank.arrived())


class SharedServerSource(SharedSource):
    """A `ServerSource` shared by all ranks."""

    def __init__(self, source: Source | None, servers: SharedServers, policy: Policy):
        """Share `source`, which is None on every rank but the first."""
        super().__init__(source, policy.weights.ranks)
        self._servers = servers

    def take(self, count: int, documents_seen: int) -> Taken:
        self._servers.ready(documents_seen)
        return super().take(count, documents_seen)
