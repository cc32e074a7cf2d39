"""The inference servers as all ranks use them: the first talks to them, and all give it the weights."""

from collections.abc import Callable, Sequence

from truestep.environments.prompts import Prompt
from truestep.environments.rater import Rates
from truestep.generate.completions import DecodeOptions, Request
from truestep.generate.rewarded import Rated
from truestep.generate.servers.probe import expect
from truestep.generate.servers.servers import Servers
from truestep.generate.servers.weight_files import Publisher
from truestep.metrics.observers import Observer
from truestep.model.policy import Policy
from truestep.rollouts.shared import SharedSource
from truestep.rollouts.source import Source, Taken
from truestep.types import Rollout


class SharedServers(Observer):
    """Every rank has one, of one process too. It publishes the policy's weights when something is first asked of the
    servers, and then after each update. Weights are written, and probes scored, by all ranks as they are laid out; no
    rank needs the whole model."""

    def __init__(self, servers: Servers | None, policy: Policy, publisher: Publisher):
        """Share `servers`, which is None on every rank but the first."""
        self._servers, self._policy, self._publisher = servers, policy, publisher
        self._ranks = policy.weights.ranks
        self._probes = self._ranks.share(lambda: self._of_first_rank.probes)
        self._published = False

    @property
    def _of_first_rank(self) -> Servers:
        assert self._servers is not None
        return self._servers

    def ready(self, documents_seen: int) -> None:
        """See to it that the servers have weights, or are being given them: the policy's, which has seen so many
        documents."""
        if not self._published:
            self.publish(documents_seen)

    def updated(self, step: int, documents_seen: int) -> None:
        if self._published:
            self.publish(documents_seen)

    def publish(self, version: int) -> None:
        self._published = True
        self._ranks.share(lambda: self._of_first_rank.wait_until_sent())
        weights = self._publisher.write(self._policy, version)
        expected = expect(self._policy, self._probes, version)
        self._ranks.share(lambda: self._of_first_rank.send(weights, expected))

    def answer(
        self,
        prompts: Sequence[Prompt],
        requests: Sequence[Request],
        options: DecodeOptions,
        rater: Rates,
        asked_to_stop: Callable[[], bool],
        documents_seen: int,
    ) -> list[Rated]:
        """Have the servers complete prompts with the current weights; every rank gets all completions."""
        self.ready(documents_seen)
        asked = (prompts, requests, options, rater, asked_to_stop)
        return self._ranks.share(lambda: self._of_first_rank.answer(*asked))

    def arrived(self) -> list[Rollout]:
        """Hand over the completions to be compared with the policy, of those since the last call."""
        return self._ranks.share(lambda: self._of_first_rank.arrived())


class SharedServerSource(SharedSource):
    """The documents of the servers, on every rank."""

    def __init__(self, source: Source | None, servers: SharedServers, policy: Policy):
        """Share `source`, which is None on every rank but the first."""
        super().__init__(source, policy.weights.ranks)
        self._servers = servers

    def take(self, count: int, documents_seen: int) -> Taken:
        self._servers.ready(documents_seen)
        return super().take(count, documents_seen)
