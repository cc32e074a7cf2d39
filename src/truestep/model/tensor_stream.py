"""Streams the tensors of a policy's files layer by layer, in an order that is known before the first tensor."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from truestep.model.adapter import is_adapters
from truestep.model.policy import Policy
from truestep.model.save import give_group, joined_dtype, plain_weights, saved_buffers, weight_groups
from truestep.process import progress
from truestep.weight_transfer.packed import Entry

Take = Callable[[Mapping[str, torch.Tensor]], None]


@dataclass(frozen=True)
class _Group:
    """Weights that are streamed together."""

    names: list[str]  # weight names in the uncut model
    last: bool  # the last group also has the model's buffers
    entries: tuple[Entry, ...] = ()  # the group's tensors under their names in files
    # The model's name of each entry; None if transformers converts values (e.g. combines tensors), not only names.
    sources: tuple[str, ...] | None = None


class TensorStream:
    """Streams the tensors that `save.stream_policy` writes, on the device of the first rank.

    transformers maps a model's tensors to a file's: it renames some and combines others. The mapping is computed once,
    on empty tensors. A group that is only renamed does not go through transformers again. Every rank makes a stream.
    """

    def __init__(self, policy: Policy, dtype: torch.dtype):
        self.policy, self._dtype = policy, dtype
        groups = weight_groups(policy)
        named = [_Group(names, number == len(groups) - 1) for number, names in enumerate(groups)]
        self._groups = policy.weights.ranks.share(lambda: [self._planned(group) for group in named])

    @property
    def entries(self) -> list[Entry]:
        """All tensors in streaming order; the same on every rank."""
        return [entry for group in self._groups for entry in group.entries]

    def give(self, take: Take) -> None:
        """Call `take` on the first rank with each group's tensors. Every rank calls this. If `take` raises, the
        remaining groups are still gathered, then every rank raises the error."""
        ranks, failed = self.policy.weights.ranks, list[Exception]()
        for group in self._groups:
            joined = self._on_first(group)
            if not ranks.first or failed:
                continue
            try:
                take(self._named(group, joined))
                progress.made("tensors published", len(group.entries))
            except Exception as error:
                failed.append(error)

        def end() -> None:
            if failed:
                raise failed[0]

        ranks.share(end)

    def _on_first(self, group: _Group) -> dict[str, torch.Tensor]:
        weights = self.policy.weights
        parts = {**weights.frozen, **weights.master}
        kept = joined_dtype(self.policy, self._dtype)
        return weights.on_device_of_first({name: parts.get(name) for name in group.names}, kept)

    def _planned(self, group: _Group) -> _Group:
        """Find a group's entries by passing uninitialised tensors, whose pages take no memory, to transformers."""
        pieces = self.policy.weights.pieces
        plain = (name for name in group.names if not is_adapters(name))
        tensors = {name: torch.empty(pieces[name].shape, dtype=self._dtype) for name in plain}
        tensors |= self._buffers(group)
        found = self._by_transformers(tensors)
        entries = tuple(Entry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in found.items())
        own = {id(tensor): name for name, tensor in tensors.items()}
        sources = [own.get(id(tensor)) for tensor in found.values()]
        known = tuple(source for source in sources if source is not None)
        return _Group(group.names, group.last, entries, known if len(known) == len(entries) else None)

    def _named(self, group: _Group, joined: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors = self._whole(group, joined)
        if group.sources is None:
            found = self._by_transformers(tensors)
            return {entry.name: found[entry.name] for entry in group.entries}
        return {entry.name: tensors[source] for entry, source in zip(group.entries, group.sources, strict=True)}

    def _whole(self, group: _Group, joined: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Merge the adapter into the weights, and add the model's buffers to the last group."""
        tensors = plain_weights(self.policy, joined, self._dtype)
        return tensors | self._buffers(group)

    def _buffers(self, group: _Group) -> dict[str, torch.Tensor]:
        return {**self.policy.buffers, **saved_buffers(self.policy.model)} if group.last else {}

    def _by_transformers(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        give_group(self.policy, tensors, found.update)
        return found
