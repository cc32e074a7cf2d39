"""Rollouts from inference servers over several ranks: the first talks to servers, and all give it the weights."""

from collections.abc import Sequence

import torch

from truestep.policy.policy import Policy
from truestep.rollouts.shared import SharedSource
from truestep.sampler.server.fleet import Published
from truestep.sampler.server.probe import expect
from truestep.sampler.server.source import ServerSource
from truestep.sampler.server.sync import WeightsDirectory
from truestep.types import Rollout


class SharedServerSource(SharedSource):
    """A server source that the first rank has. Weights are written, and probes scored, by all ranks as they are laid
    out; no rank needs the whole model."""

    def __init__(
        self, source: ServerSource | None, policy: Policy, weights: WeightsDirectory, weights_dtype: torch.dtype
    ):
        """Share `source`, which is None on every rank but the first."""
        super().__init__(source, policy.weights.ranks)
        self._servers, self._policy = source, policy
        self._weights, self._weights_dtype = weights, weights_dtype
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

    def _publish(self, version: int) -> None:
        self._published = True
        self._ranks.share(lambda: self._of_first_rank.wait_until_sent())
        path = self._weights.write(self._policy, version, self._weights_dtype)
        published = Published(path, expect(self._policy, self._probes, version))
        self._ranks.share(lambda: self._of_first_rank.send(published))
