"""Float32 weights sharded over ranks (FSDP2). Each layer is all-gathered in the compute type when it is used.

Each layer is an FSDP group; so are the embedding and the head (one group if tied). Gradients are reduce-scattered in
float32 on a step's last micro-batch, or on each to save memory. The head's weight is gathered once per micro-batch,
and its gradient is accumulated in float32 over chunks and micro-batches before it is reduced.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from truestep.gpu.pinned import to_host
from truestep.ranks.exchange import reduce_scatter
from truestep.ranks.group import Ranks
from truestep.weights.errors import ModelError
from truestep.weights.layers import layers_of
from truestep.weights.lazy import read_all, replace_parameters
from truestep.weights.pieces import WeightSlice, pieces_of, sum_parts
from truestep.weights.protocol import StagePass, Weights, some_rows


class ShardedWeights(Weights):
    """Shards an unread float32 model, reads this rank's part, and makes the model compute in `dtype`."""

    def __init__(
        self,
        model: Any,
        dtype: torch.dtype,
        ranks: Ranks,
        pieces: dict[str, WeightSlice] | None = None,
        *,
        device: torch.device,
        reshard: bool = True,
        reduce_each: bool = False,
        masters_on_host: bool = False,
    ):
        assert ranks.mesh is not None
        self.ranks, self.dtype, self.masters_on_host = ranks, dtype, masters_on_host
        self._place = device
        self._gradients: dict[str, torch.Tensor] = {}
        self.pieces = pieces or pieces_of(model)
        self._reshard, self._reduce_each = reshard, reduce_each
        self._group = ranks.mesh.get_group("shard")
        unread = dict(model.named_parameters())
        # meta parameters: FSDP shards shapes, without copying values
        replace_parameters(model, partial(_without_values, dtype))
        names = {parameter: name for name, parameter in model.named_parameters()}
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        # A pipeline stage has the embedding, the head, or neither. A tied weight is on the first and the last stage;
        # the last stage uses it only as the head.
        self._tied = head.weight is not None and head.weight is embedding.weight
        self._head_name = names.get(head.weight)
        self._head_module: Any = embedding if self._tied else head
        self._embedding, self._base = embedding, model.base_model
        if self._tied:
            # Remove the head's parameter; the head uses the embedding's. A second parameter would keep the unsharded
            # tensor alive, and would be trained separately.
            head.register_parameter("weight", None)
        self._layers: list[Any] = layers_of(model)[1]
        self._shard_modules(model)
        self._read_parts(model, unread, device)
        self._head_gradient: torch.Tensor | None = None
        self.zero_gradients()

    def _shard_modules(self, model: Any) -> None:
        """Apply FSDP to each layer, the embedding, the rest of the body, and the head."""
        assert self.ranks.mesh is not None
        computed = None if self.dtype == torch.float32 else self.dtype
        precision = MixedPrecisionPolicy(param_dtype=computed, reduce_dtype=torch.float32, cast_forward_inputs=False)
        dimensions = ("replicate", "shard") if self.ranks.size_of("data_replicate") > 1 else ("shard",)
        options: dict[str, Any] = {"mesh": self.ranks.mesh[dimensions], "mp_policy": precision}
        divided = {name for name, piece in self.pieces.items() if "expert" in piece.cut}
        if self.ranks.expert_mesh is not None:
            of_experts = options | {"mesh": self.ranks.expert_mesh[dimensions]}
            for name, module in model.named_modules():
                if any(f"{name}.{own}" in divided for own, _ in module.named_parameters(recurse=False)):
                    fully_shard(module, reshard_after_forward=self._reshard, **of_experts)
        for layer in filter(_has_weights, self._layers):
            fully_shard(layer, reshard_after_forward=self._reshard, **options)
        # A tied embedding stays gathered for the head.
        if _has_weights(self._embedding):
            fully_shard(self._embedding, reshard_after_forward=self._reshard and not self._tied, **options)
        fully_shard(self._base, reshard_after_forward=self._reshard, **options)
        if not self._tied and _has_weights(self._head_module):
            fully_shard(self._head_module, reshard_after_forward=False, **options)
        self._modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for module in self._modules:
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)

    def _read_parts(self, model: Any, unread: Mapping[str, torch.Tensor], device: torch.device) -> None:
        """Read this rank's part of each weight into the memory that FSDP gathers from."""
        left_over = {name for name, parameter in model.named_parameters() if not hasattr(parameter, "to_local")}
        if left_over:
            raise ModelError(
                f"{type(model).__name__} has weights outside its body and its head ({', '.join(sorted(left_over))}), "
                "which cannot be sharded: set parallel.data_shard: 1 and parallel.context: 1"
            )
        model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
        self._sharded: dict[str, Any] = dict(model.named_parameters())
        read_all({self.shard(name, unread[name]): part.to_local() for name, part in self._sharded.items()})
        self.frozen = {n: p.to_local().detach() for n, p in self._sharded.items() if not p.requires_grad}
        # Masters are views of the shards, so the next all-gather reads what the optimizer writes.
        trained = {name: parameter for name, parameter in self._sharded.items() if parameter.requires_grad}
        self._computed: dict[str, torch.Tensor] = {}
        if self.masters_on_host:
            self._masters = {n: torch.nn.Parameter(to_host(part.to_local().detach())) for n, part in trained.items()}
            self._free_masters(trained)
        else:
            self._masters = {name: torch.nn.Parameter(part.to_local().detach()) for name, part in trained.items()}

    def _free_masters(self, trained: Mapping[str, Any]) -> None:
        """Replace each float32 shard on the device by a copy in `dtype`, and make FSDP all-gather the copy."""
        for name, part in trained.items():
            local = part.to_local().detach()
            padded = local.new_zeros((self._rows(name), *local.shape[1:]), dtype=self.dtype)
            self._computed[name] = padded[: len(local)]
            self._computed[name].copy_(local)
            gather_from(part, padded)
        for module in self._modules:
            module.unshard()  # FSDP detects the shards' extensions at its first all-gather
            module.reshard()
        for part in trained.values():
            part.to_local().untyped_storage().resize_(0)

    @property
    def device(self) -> torch.device:
        return self._place

    @property
    def gradients(self) -> dict[str, torch.Tensor]:
        assert len(self._gradients) == len(self._masters), "every master has a gradient from its first step on"
        return dict(self._gradients)

    def _keep_gradient(self, name: str, gradient: torch.Tensor) -> None:
        """Store a gradient, or add it to the stored one."""
        if name in self._gradients:
            self._gradients[name].add_(gradient)
            return
        self._gradients[name] = gradient
        if not self.masters_on_host:
            self._masters[name].grad = gradient

    def zero_gradients(self) -> None:
        self._head_gradient = None
        self._gradients.clear()
        for name, master in self._masters.items():
            self._sharded[name].grad = None
            master.grad = None

    def before_forward(self, coming: StagePass) -> None:
        # A layer's weights are gathered once for all micro-batches of a group.
        reshard = self._reshard and (coming.group == 1 or (not coming.backward and coming.last_of_group))
        for module in self._modules_of(coming):
            module.set_reshard_after_forward(reshard, recurse=False)

    def before_backward(self, coming: StagePass) -> None:
        self._base.set_is_last_backward((coming.last and coming.final) or self._reduce_each)
        modules = self._modules_of(coming)
        if coming.begins:
            modules.append(self._embedding)
        if coming.ends:
            modules.append(self._base)
        for module in modules:
            module.set_requires_gradient_sync(coming.last or self._reduce_each, recurse=False)
            module.set_reshard_after_backward(coming.last_of_group, recurse=False)

    def _modules_of(self, coming: StagePass) -> list[Any]:
        """List the FSDP groups of a stage's layers: each layer, and its experts if they are divided over ranks."""
        every = (module for layer in self._layers[coming.layers] for module in layer.modules())
        return [module for module in every if isinstance(module, FSDPModule)]

    @contextmanager
    def head(self, model: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        self._head_module.unshard()
        weight = self._head_module.weight
        yield weight.detach(), self._head_buffer(weight)
        # On the first stage a tied weight stays gathered for the embedding's backward pass.
        embeds = self._tied and self.ranks.stage == 0
        if not embeds or not torch.is_grad_enabled():
            self._head_module.reshard()
        if self._reduce_each:
            self._reduce_head()

    def _head_buffer(self, weight: torch.Tensor) -> torch.Tensor | None:
        if self._head_name not in self._masters:
            return None
        if self._head_gradient is None:
            # Pad to a multiple of the ranks, as reduce-scatter needs.
            rows = -(-weight.shape[0] // self.ranks.shards) * self.ranks.shards
            self._head_gradient = torch.zeros(rows, weight.shape[1], dtype=torch.float32, device=weight.device)
        return self._head_gradient[: weight.shape[0]]

    @torch.no_grad()
    def _reduce_head(self) -> None:
        gradient, self._head_gradient = self._head_gradient, None
        if gradient is None:
            return
        part = gradient.new_empty(gradient.shape[0] // self.ranks.shards, gradient.shape[1])
        reduce_scatter(part, gradient, group=self._group)
        assert self._head_name is not None
        reduced = self.ranks.sum_over("replicate", part)[: self._masters[self._head_name].shape[0]]
        self._keep_gradient(self._head_name, reduced)

    @torch.no_grad()
    def reduce(self) -> None:
        self._reduce_head()
        for name, master in self._masters.items():
            reduced = self._sharded[name].grad
            if reduced is not None:
                self._keep_gradient(name, reduced.to_local())
                self._sharded[name].grad = None
            elif name not in self._gradients:
                self._keep_gradient(name, torch.zeros_like(master, device=self.device))
        sum_parts(self.ranks, self.pieces, self.gradients)

    def _rows(self, name: str) -> int:
        """Return the number of rows of a rank's shard. The last ranks may have fewer rows, or none."""
        return -(-self._sharded[name].shape[0] // self.pieces[name].shard_of(self.ranks)[0])

    def shard(self, name: str, piece: torch.Tensor) -> torch.Tensor:
        rows, number = self._rows(name), self.pieces[name].shard_of(self.ranks)[1]
        return piece[rows * number : rows * (number + 1)]

    def unshard_on_first(self, parts: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        # Parts are rounded before they are sent, to send fewer bytes. They are received directly into the result.
        joined: dict[str, torch.Tensor] = {}
        messages: dict[Any, list[Any]] = {}
        for name, part in parts.items():
            kind = min(dtype, part.dtype, key=lambda kind: kind.itemsize)
            group = self._group_of(name)
            asked = messages.setdefault(group, [])
            if self.pieces[name].shard_of(self.ranks)[1]:
                asked += _message(dist.isend, part.to(self.device, kind), 0, group)
                continue
            shape = (self._sharded[name].shape[0], *part.shape[1:])
            whole = joined[name] = torch.empty(shape, dtype=kind, device=self.device)
            first, *others = whole.split(self._rows(name))
            first.copy_(part)
            for rank, place in enumerate(others, start=1):
                asked += _message(dist.irecv, place, rank, group)
        for asked in filter(None, messages.values()):
            for sending in dist.batch_isend_irecv(asked):
                sending.wait()
        return joined

    def _group_of(self, name: str) -> dist.ProcessGroup:
        """Return the ranks over which this rank's slice of a weight is sharded."""
        experts = self.ranks.expert_mesh
        if experts is None or "expert" not in self.pieces[name].cut:
            return self._group
        return experts.get_group("shard")

    @contextmanager
    def gathered(self) -> Iterator[None]:
        self._settle()
        for module in self._modules:
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
        try:
            yield
        finally:
            for module in self._modules:
                module.reshard()
                kept = self._tied and module is self._head_module
                module.set_reshard_after_forward(self._reshard and not kept, recurse=False)

    def let_go_of_gathered(self) -> None:
        for module in self._modules:
            module.reshard()

    @torch.no_grad()
    def publish(self) -> None:
        """Copy masters on the host to the device. Masters on the device need no copy: an all-gather reads them."""
        for name, copy in self._computed.items():
            copy.copy_(self.master[name])

    def computed_rows(self, name: str, rows: slice) -> torch.Tensor | None:
        return some_rows(self._computed[name], rows) if name in self._computed else None


def _message(kind: Any, content: torch.Tensor, peer: int, group: dist.ProcessGroup) -> list[Any]:
    """Make a point-to-point message within a shard group. It is sent as bytes, because not every backend supports every
    dtype."""
    if not content.numel():  # the last ranks may have no rows
        return []
    return [dist.P2POp(kind, content.contiguous().view(-1).view(torch.uint8), group=group, group_peer=peer)]


def gather_from(sharded: Any, padded: torch.Tensor) -> None:
    """Make FSDP gather a parameter from `padded`, not from its shard. Call this before FSDP's first all-gather.

    These are FSDP2's extensions: the first function returns the tensors to gather, the second makes the parameter from
    the gathered tensors.
    """

    def before(mesh: Any) -> tuple[tuple[torch.Tensor], None]:
        return (padded,), None

    def after(gathered: tuple[torch.Tensor], metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
        return None if out is not None else (gathered[0], ())

    local = sharded._local_tensor
    local.fsdp_pre_all_gather, local.fsdp_post_all_gather = before, after


def _without_values(dtype: torch.dtype, parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """Return a meta parameter: in its own dtype (float32) if trained, in `dtype` if frozen."""
    kept = parameter.dtype if parameter.requires_grad else dtype
    empty = torch.empty(parameter.shape, dtype=kept, device="meta")
    return torch.nn.Parameter(empty, requires_grad=parameter.requires_grad)


def _has_weights(module: torch.nn.Module) -> bool:
    return next(module.parameters(), None) is not None
