"""The user's architecture and rollouts at a size that a float64 loop can follow.

The model keeps its kind, its traits (tied or not, windows, softcaps, experts, shared key heads) and none of its size.
Documents keep their order, masks, advantages, rewards, groups, temperatures and versions, but not their length, and
their token ids are taken modulo the small vocabulary. A random model's log-probs have nothing to do with the real
one's, so the sampler's are made anew around them, with ratios on both sides of both clip bounds.
"""

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from truestep.losses.label_losses import LabelLoss
from truestep.policy.errors import ModelError
from truestep.types import Rollout
from truestep.verify.oracle.records import Record
from truestep.verify.oracle.step import oracle_logprobs
from truestep.verify.reference import Reference

VOCABULARY = 97  # a prime: no block, shard or chunk divides it
LAYERS = 4  # the longest pipeline among the layouts has as many stages
_SIZES: dict[str, int] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCABULARY,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "max_window_layers": 1,
}
_SPREAD = 0.25  # standard deviation of log-ratios


def reduce_model(source: Path, directory: Path, seed: int, trust_remote_code: bool) -> Path:
    """Write a small random model of the source's architecture into the directory, and return that."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(source, local_files_only=True, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ModelError(f"model.path: {source} has no config.json that can be read: {error}") from error
    settings = config.to_dict()
    few_keys = settings.get("num_key_value_heads") not in (None, settings.get("num_attention_heads"))
    sizes = _SIZES | {"num_attention_heads": 4, "num_key_value_heads": 2 if few_keys else 4, "head_dim": 16}
    for name, size in sizes.items():
        if isinstance(settings.get(name), int):
            settings[name] = size
    if settings.get("layer_types"):
        kinds = list(dict.fromkeys(settings["layer_types"]))[:2]
        settings["layer_types"] = (kinds * LAYERS)[:LAYERS]
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if isinstance(settings.get(name), list):
            settings[name] = [token % VOCABULARY for token in settings[name]]
        elif settings.get(name) is not None:
            settings[name] %= VOCABULARY
    small = type(config).from_dict(settings)
    small.architectures = config.architectures
    with torch.random.fork_rng(devices=[]):
        loader: Any = AutoModelForCausalLM
        model = loader.from_config(small, dtype=torch.float32, trust_remote_code=trust_remote_code)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms and biases keep the value they begin with, and matrices get noise that tells tokens apart.
            scale = 0.15 if parameter.ndim >= 2 else 0.1
            noise = scale * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise if parameter.ndim >= 2 else parameter + noise)
    model.save_pretrained(directory)
    return directory


def record_of(document: Rollout) -> Record:
    """Write a document as one line of a rollout file; its advantages are made of rewards already."""
    record: Record = {
        "id": document.id,
        "input_ids": document.input_ids.tolist(),
        "loss_mask": document.loss_mask.astype(int).tolist(),
        "temperature": document.temperature,
    }
    fields = {
        "logprobs": document.logprobs,
        "advantage": document.advantages,
        "model_version": document.model_version,
        "reference_logprobs": document.reference_logprobs,
    }
    record |= {name: values.tolist() for name, values in fields.items() if values is not None}
    facts = {"reward": document.reward, "truncated": document.truncated, "rewards": dict(document.rewards) or None}
    record |= {name: value for name, value in facts.items() if value is not None}
    return record if document.difference is None else with_difference(record, document.difference)


def with_difference(record: Record, difference: float) -> Record:
    """Give a record, in place of its advantage, the difference of which a step's scale makes one."""
    own = {name: value for name, value in record.items() if name != "advantage"}
    return {"reward": difference} | own | {"group_id": record["id"], "metadata": {"difference": difference}}


def given_differences(group: Sequence[Rollout]) -> list[float]:
    """Read the differences of records that `with_difference` wrote, as data.advantages."""
    return [rollout.metadata["difference"] for rollout in group]


def reduce_record(record: Record, most: int) -> Record:
    """Keep the end of the document, which holds its labels; position 0 is never a label."""
    cut = max(0, len(record["input_ids"]) - most)
    short = {name: value[cut:] if isinstance(value, list) else value for name, value in record.items()}
    short["input_ids"] = [token % VOCABULARY for token in short["input_ids"]]
    short["loss_mask"] = [0, *short["loss_mask"][1:]]
    return short


def redraw_logprobs(
    model: Path, records: Sequence[Record], loss: LabelLoss, seed: int, trust_remote_code: bool
) -> None:
    """Draw the records' log-probs anew, in place.

    For a loss of whole documents a document's mean is moved; else every label has its own noise.
    """
    draw = random.Random(seed)
    new = oracle_logprobs(Reference(model, None, trust_remote_code), list(records))
    bounds = [] if loss.bounds is None else [math.log(bound) if bound > 0 else -3.0 for bound in loss.bounds]
    for number, (record, values) in enumerate(zip(records, new, strict=True)):
        shifts = [_draw_away_from(bounds, draw) for _ in values]
        if loss.whole_documents and bounds and values:
            low, high = bounds[0], bounds[1]
            target = (1.8 * low, 0.4 * high, 1.8 * high, 0.4 * low)[number % 4]
            noise = [draw.gauss(0.0, 0.1) for _ in values]
            shifts = [target + value - sum(noise) / len(noise) for value in noise]
        old = iter(min(value - shift, 0.0) for value, shift in zip(values, shifts, strict=True))
        record["logprobs"] = [next(old) if label else 0.0 for label in record["loss_mask"]]


def _draw_away_from(bounds: Sequence[float], draw: random.Random) -> float:
    """Draw a log-ratio that is not so near a bound that float32 would decide on which side it lies."""
    spread = max([_SPREAD, *(abs(bound) for bound in bounds)])
    while True:
        value = draw.gauss(0.0, spread)
        if all(abs(value - bound) > 1e-2 * abs(bound) + 1e-5 for bound in bounds):
            return value
