"""Makes the ranks of a run, and the policy on them."""

from pathlib import Path

from truestep.config.schema import Config
from truestep.head.logits import HeadSettings
from truestep.policy.adapter_files import is_adapter
from truestep.policy.errors import ModelError
from truestep.policy.loading.load import load_policy
from truestep.policy.model.adapter import AdapterSettings, AdapterSource
from truestep.policy.policy import Policy
from truestep.ranks.axes import AXES, RankLayout
from truestep.ranks.group import Ranks, join


def join_ranks(config: Config) -> Ranks:
    parallel = config.parallel
    layout = RankLayout(**{axis.name: getattr(parallel, axis.name) for axis in AXES})
    return join(layout, device=config.model.device, stall_timeout=config.schedule.stall_timeout)


def make_policy(config: Config, ranks: Ranks, path: str | None = None, *, frozen: bool = False) -> Policy:
    """Load the policy, or with `frozen` a model beside it whose weights are never trained. `path`: that model, or the
    checkpoint that the policy comes from."""
    model, head = config.model, config.model.head
    adapter = None if frozen else adapter_source(config, None if path is None else Path(path))
    chunk = None if head.logits_chunk_size == "auto" else head.logits_chunk_size
    return load_policy(
        model.path if adapter is not None else path or model.path,
        dtype=model.dtype,
        device=model.device,
        head=HeadSettings(
            fp32=head.fp32_lm_head,
            chunk_size=chunk,
            deterministic=config.deterministic,
            split_gradient=head.head_gradient == "split",
        ),
        activation_checkpointing=model.activation_checkpointing,
        compiled=model.compile,
        trust_remote_code=model.trust_remote_code,
        longest_document=config.data.tokens_per_microbatch,
        ranks=ranks,
        reshard_after_forward=config.parallel.reshard_after_forward,
        reduce_each=config.parallel.reduce_each_micro_batch,
        stages_per_rank=config.parallel.stages_per_rank,
        frozen=frozen,
        masters_on_host=not frozen and getattr(config.optimizer, "offload", "none") == "all",
        freeze=() if frozen else (model.freeze or ()),
        adapter=adapter,
    )


def adapter_source(config: Config, checkpoint: Path | None = None) -> AdapterSource | None:
    """Say where the adapter comes from: a checkpoint, a directory, or its options."""
    adapter = config.adapter
    if checkpoint is not None and is_adapter(checkpoint) != (adapter is not None):
        has, lacks = ("an adapter", "no section adapter") if adapter is None else ("a whole model", "an adapter")
        raise ModelError(f"adapter: {checkpoint} holds {has}, and the configuration has {lacks}")
    if adapter is None:
        return None
    path = None if adapter.path is None else Path(adapter.path)
    settings = None
    if path is None:
        settings = AdapterSettings(adapter.rank, adapter.alpha, adapter.targets, config.seed)
    return AdapterSource(settings, checkpoint or path)
