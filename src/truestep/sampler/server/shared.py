"""Rollouts from inference servers over several ranks: the first talks to servers, and all give it the weights."""

from collections.abc import Callable, Sequence

from truestep.environments.prompts import Prompt
from truestep.environments.rater import Rates
from truestep.policy.policy import Policy
from truestep.rollouts.shared import SharedSource
from truestep.sampler.completions import DecodeOptions, Request
from truestep.sampler.rated import Rated
from truestep.sampler.server.probe import expect
from truestep.sampler.server.source import ServerSource
from truestep.sampler.server.sync import Publisher
from truestep.types import Rollout


class SharedServerSource(SharedSource):
    """A server source that the first rank has. Weights are written, and probes scored, by all ranks as they are laid
    out; no rank needs the whole model."""

    def __init__(self, source: ServerSource | None, policy: Policy, publisher: Publisher):
        """Share `source`, which is None on every rank but the first."""
        super().__init__(source, policy.weights.ranks)
        self._servers, self._policy, self._publisher = source, policy, publisher
        self._probes = self._ranks.share(lambda: self._of_first_rank.probes)
        self._published = False

    @property
    def _of_first_rank(self) -> ServerSource:
        assert self._servers is not None
        return self._servers

    def take(self, count: int, documents_seen: int) -> Sequence[Rollout]:
        if not self._published:
            self._publish(documents_seen)
        return super().take(count, documents_seen)

    def updated(self, documents_seen: int) -> None:
        super().updated(documents_seen)
        if self._published:
            self._publish(documents_seen)

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
        if not self._published:
            self._publish(documents_seen)
        asked = (prompts, requests, options, rater, asked_to_stop, documents_seen)
        return self._ranks.share(lambda: self._of_first_rank.answer(*asked))

    def arrived(self) -> list[Rollout]:
        return self._ranks.share(lambda: self._of_first_rank.arrived())

    def _publish(self, version: int) -> None:
        self._published = True
        self._ranks.share(lambda: self._of_first_rank.wait_until_sent())
        weights = self._publisher.write(self._policy, version)
        expected = expect(self._policy, self._probes, version)
        self._ranks.share(lambda: self._of_first_rank.send(weights, expected))
