"""Makes the ranks of a run and its policy."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from truestep.config.schema import Config
from truestep.head.logits import HeadSettings
from truestep.model.experts.routing import ExpertSettings
from truestep.model.loading.adapter_source import adapter_source
from truestep.model.loading.load import LoadOptions, load_policy
from truestep.model.policy import Policy
from truestep.ranks.axes import AXES, DERIVED, RankLayout
from truestep.ranks.group import Ranks, join


def layout_of(config: Config) -> RankLayout:
    parallel = config.parallel
    return RankLayout(**{name: getattr(parallel, name) for name in (*(axis.name for axis in AXES), *DERIVED)})


def join_ranks(
    config: Config, patience: float | None = None, give_up: Callable[[str], None] = lambda reason: None
) -> Ranks:
    return join(
        layout_of(config),
        device=config.model.device,
        stall_timeout=config.schedule.stall_timeout,
        patience=patience,
        give_up=give_up,
    )


def chosen(value: Any) -> Any:
    """Return an option's value, or False for `auto`. For the policy, `train` has replaced `auto` before; models that
    are not trained do not need the option."""
    return False if value == "auto" else value


def make_policy(
    config: Config, ranks: Ranks, path: str | None = None, *, frozen: bool = False, base: Policy | None = None
) -> Policy:
    """Load the policy, or with `frozen` a model that is not trained, such as the reference. `path` is the checkpoint of
    the policy, or the directory of the frozen model. `base`: a policy whose frozen weights are shared."""
    model, head = config.model, config.model.head
    adapter = None if frozen else adapter_source(config.adapter, config.seed, None if path is None else Path(path))
    chunk = None if head.logits_chunk_size == "auto" else head.logits_chunk_size
    options = LoadOptions(
        dtype=model.dtype,
        device=model.device,
        head=HeadSettings(
            fp32=head.fp32_lm_head,
            chunk_size=chunk,
            deterministic=config.deterministic,
            split_gradient=head.head_gradient == "split",
        ),
        activation_checkpointing=chosen(model.activation_checkpointing),
        offload_activations=not frozen and bool(chosen(model.activation_offload)),
        compiled=model.compile,
        attending=model.attention,
        trust_remote_code=model.trust_remote_code,
        longest_document=config.data.tokens_per_microbatch,
        ranks=ranks,
        reshard_after_forward=config.parallel.reshard_after_forward,
        reduce_each=bool(chosen(config.parallel.reduce_each_micro_batch)),
        stages_per_rank=config.parallel.stages_per_rank,
        frozen=frozen,
        masters_on_host=not frozen and getattr(config.optimizer, "offload", "none") == "all",
        freeze=() if frozen else (model.freeze or ()),
        adapter=adapter,
        experts=ExpertSettings(replay="off") if frozen else ExpertSettings(**model.experts.model_dump()),
        base=base,
    )
    return load_policy(model.path if adapter is not None else path or model.path, options)
