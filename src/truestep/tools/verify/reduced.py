"""The user's architecture and documents, reduced to a size that is fast in float64.

The model keeps its architecture (tied weights, windows, softcaps, experts, grouped-query attention) but not its size.
Documents keep their order, masks, advantages, rewards, groups, temperatures and versions. They are shortened, and token
ids are taken modulo the small vocabulary. The log-probs of a random model differ from the real one's, so new sampler
log-probs are drawn near the random model's, with ratios on both sides of all clip bounds.
"""

import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from truestep.config.sections import AdapterConfig
from truestep.losses.label_losses import Switch
from truestep.losses.objective import Objective
from truestep.model.adapter import DOWN, Adapter, attach, matches, target_modules
from truestep.model.adapter_files import read_adapter, write_adapter
from truestep.model.towers import text_config
from truestep.rollouts.fields import Field, from_records
from truestep.rollouts.turns import turn_lines
from truestep.tools.verify.custom import document_labels
from truestep.tools.verify.oracle.records import Document, Record, read_document
from truestep.tools.verify.oracle.step import oracle_logprobs
from truestep.tools.verify.reference import Reference
from truestep.types import ROUTES, Rollout
from truestep.weights.errors import ModelError

VOCABULARY = 97  # a prime: not divisible by blocks, shards or chunks
LAYERS = 4  # as many as the stages of the longest pipeline among the layouts
_SIZES: dict[str, int] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": LAYERS // 2,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    # latent attention
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 24,
    "v_head_dim": 16,
    "sliding_window": 8,
    "max_window_layers": 1,
    # recurrent layers: the gated delta rule, KDA, Mamba
    "linear_num_value_heads": 4,
    "linear_num_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_head_dim": 8,
    "mamba_num_heads": 4,
    "mamba_n_heads": 4,
    "n_mamba_heads": 4,
    "mamba_head_dim": 16,
    "mamba_headdim": 16,
    "mamba_d_head": 16,
    "mamba_d_ssm": 64,
    "mamba_d_state": 8,
    "mamba_dt_rank": 4,
    "ssm_state_size": 8,
    "mamba_n_groups": 2,
    "mamba_ngroups": 2,
    "n_groups": 2,
    "mamba_expand": 2,
    "chunk_size": 8,
    "mamba_chunk_size": 8,
}
# standard deviations of log-ratios; the first that gives values on both sides of all bounds is used
_SPREADS = (0.25, 0.5, 1.0, 2.0, 4.0)
_ON_EACH_SIDE = 2  # fewest labels on each side of each bound
_ATTEMPTS = 10_000
# In bfloat16 a label's log-ratio has an error of a few hundredths, and a document's mean log-ratio one of about 0.01.
# That is much more than the width of some clips. So documents keep one of these distances from bounds on whole
# documents, and labels half of it from bounds on labels. The first distance at which log-probs can be drawn is used.
_CLEARANCES = (0.2, 0.1, 0.05)
_FEW_ATTEMPTS = 100
_FEW = 4  # a convolution sums at most this many numbers
_BESIDE_ZERO = 0.1  # distance of a document's value from a bound that is 0


def reduce_model(source: Path, directory: Path, seed: int, trust_remote_code: bool) -> Path:
    """Write a small random model of the source's architecture into `directory`, and return `directory`."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(source, local_files_only=True, trust_remote_code=trust_remote_code)
        config = text_config(config)
    except (OSError, ValueError) as error:
        raise ModelError(f"model.path: {source} has no config.json that can be read: {error}") from error
    settings = config.to_dict()
    few_keys = settings.get("num_key_value_heads") not in (None, settings.get("num_attention_heads"))
    few_groups = settings.get("linear_num_key_heads") != settings.get("linear_num_value_heads")
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2 if few_keys else 4, "head_dim": 16}
    if any(name.startswith(("linear_", "mamba_")) or name == "ssm_state_size" for name in settings):
        # A recurrent layer normalises what it reads from its state. For a document's first tokens that is almost zero,
        # and a small epsilon would amplify its rounding.
        settings |= dict.fromkeys(settings.keys() & {"rms_norm_eps", "layer_norm_epsilon"}, 1e-2)
    sizes = _SIZES | heads | {"linear_num_key_heads": 2 if few_groups else 4}
    if settings.get("head_dim") == settings.get("qk_rope_head_dim"):
        # latent attention: rotary embeddings use `head_dim` as their size
        sizes["head_dim"] = sizes["qk_rope_head_dim"]
    for name, size in sizes.items():
        if isinstance(settings.get(name), int) and settings[name]:
            settings[name] = size
    _keep_few_layers(settings, config.get_text_config().num_hidden_layers, sizes)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if isinstance(settings.get(name), list):
            settings[name] = [token % VOCABULARY for token in settings[name]]
        elif settings.get(name) is not None:
            settings[name] %= VOCABULARY
    small = type(config).from_dict(settings)
    small.architectures = config.architectures
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # some model families draw random biases too
        loader: Any = AutoModelForCausalLM
        model = loader.from_config(small, dtype=torch.float32, trust_remote_code=trust_remote_code)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norms and biases get noise on top of their initial values. Matrices get noise large enough to distinguish
            # tokens. A convolution sums few numbers, so its weights are larger; else almost nothing of its input would
            # be left.
            scale = (0.15 if parameter.shape[-1] > _FEW else 0.5) if parameter.ndim >= 2 else 0.1
            noise = scale * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise if parameter.ndim >= 2 else parameter + noise)
            if parameter.ndim == 1 and name.endswith(("A_log", "dt_bias")):
                # With the families' initial values, a state decays within two tokens. Gradients would then be small
                # differences of large sums, and rounding weights to float32 would change them by more than the bound.
                parameter.copy_(3 * noise - (0.5 if name.endswith("dt_bias") else 0.0))
        for module in model.modules():
            if getattr(module, "scaling", None) == 1.0 and hasattr(module, "q_norm"):
                # scores are not scaled, and would be so large that their rounding matters
                module.q_norm.weight.mul_(0.25)
    model.save_pretrained(directory)
    return directory


def _keep_few_layers(settings: dict[str, Any], before: int, sizes: Mapping[str, int]) -> None:
    """Cut per-layer settings to `LAYERS` layers, with every kind of layer among them. A layer with its own size keeps a
    size that differs from the model's."""
    like = list(range(before))  # the original layers that are kept
    for name, kinds in settings.items():
        if isinstance(kinds, list) and len(kinds) == before and all(isinstance(kind, str) for kind in kinds):
            different = [kinds.index(kind) for kind in dict.fromkeys(kinds)][:LAYERS]
            like = (different * LAYERS)[:LAYERS]
            settings[name] = [kinds[layer] for layer in like]
    own = settings.get("per_layer_config") or {}
    kept = {str(layer): own[str(old)] for layer, old in enumerate(like[:LAYERS]) if str(old) in own}
    if own:
        settings["per_layer_config"] = {
            layer: {name: 2 * sizes[name] if name in sizes else value for name, value in values.items()}
            for layer, values in kept.items()
        }


def still_matching(model: Path, patterns: Sequence[str], trust_remote_code: bool) -> list[str]:
    """Return the patterns of model.freeze that match weights of the reduced model, which has few layers. Patterns that
    would leave nothing to train are dropped."""
    kept: list[str] = []
    for pattern in patterns:
        reference = Reference(model, None, trust_remote_code)
        before = len(reference.parameters)
        reference.freeze([pattern])
        matches = len(reference.parameters) < before
        reference.freeze([*kept, pattern])
        if matches and reference.parameters:
            kept.append(pattern)
    return kept


def draw_adapter(given: AdapterConfig, model: Path, directory: Path, seed: int, trust_remote_code: bool) -> Path:
    """Write a random adapter with the user's options; neither A nor B is zero. Targets in layers that a reduced model
    does not have are dropped. If none is left, the targets' names without the layer are used."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model, local_files_only=True, trust_remote_code=trust_remote_code)
    loader: Any = AutoModelForCausalLM
    with torch.device("meta"):
        made = loader.from_config(config, trust_remote_code=trust_remote_code)
    wanted = None if given.path is None else read_adapter(Path(given.path))[0]
    targets = given.targets if wanted is None else list(wanted.modules)
    rank, alpha = (given.rank, given.alpha) if wanted is None else (wanted.rank, wanted.alpha)
    adapter = Adapter(rank, alpha, _modules(made, targets))
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}

    def draw(name: str, shape: torch.Size) -> torch.Tensor:
        # The adapter adds about a tenth of the input's size to the output.
        size = shape[1] ** -0.5 if f".{DOWN}." in name else 0.1 / (rank**0.5 * adapter.scale)
        tensors[name] = size * torch.randn(shape, generator=generator)
        return tensors[name]

    attach(made, adapter, draw)
    write_adapter(directory, adapter, tensors, model)
    return directory


def _modules(model: Any, targets: str | Sequence[str]) -> tuple[str, ...]:
    if isinstance(targets, str):
        return target_modules(model, targets)
    names = [name for name, _ in model.named_modules()]
    left = [target for target in targets if any(matches(name, target) for name in names)]
    within = sorted({re.sub(r"^.*\.([^.]*[\d*\]][^.]*)\.", "", target) for target in targets})
    return target_modules(model, left or within)


def record_of(document: Rollout, declared: Sequence[Field] = ()) -> Record:
    """Convert a document to a record of a rollout file. `declared`: the user's own fields."""
    record: Record = {
        "id": document.id,
        "input_ids": document.input_ids.tolist(),
        "loss_mask": document.loss_mask.astype(int).tolist(),
        "temperature": document.temperature,
    }
    for field in from_records(declared):
        value = document.value(field.name)
        if isinstance(value, Mapping):
            value = dict(value) or None
        elif isinstance(value, tuple):
            value = turn_lines(value) or None
        if value is not None:
            record[field.in_record] = value.tolist() if isinstance(value, np.ndarray) else value
    return record


def records_of(document: Rollout, declared: Sequence[Field] = ()) -> list[Record]:
    """Convert a document to records of a rollout file, one for each of its sequences."""
    if not document.starts:
        return [record_of(document, declared)]
    joined = {"document_id": document.id, "sequences": len(document.starts)}
    return [record_of(sequence, declared) | joined for sequence in document.sequences]


def reduce_record(record: Record, most: int) -> Record:
    """Keep the last `most` tokens of a document, which contain its labels. Position 0 is never a label."""
    cut = max(0, len(record["input_ids"]) - most)
    of_tokens = {name: value for name, value in record.items() if isinstance(value, list) and name != "turns"}
    short = record | {name: value[cut:] for name, value in of_tokens.items()}
    if "turns" in record:
        moved = [turn | {"start": max(turn["start"] - cut, 0), "end": turn["end"] - cut} for turn in record["turns"]]
        short["turns"] = [turn for turn in moved if turn["end"] > 0]
    short["input_ids"] = [token % VOCABULARY for token in short["input_ids"]]
    short["loss_mask"] = [0, *short["loss_mask"][1:]]
    return short


def without_routes(record: Record) -> Record:
    return {name: value for name, value in record.items() if name != ROUTES}


def draw_routes(records: list[Record], how: str, model: Path, seed: int, trust_remote_code: bool) -> list[Record]:
    """Give records random experts that differ from the routers' own choices. Tokens after the same prefix get the same
    experts, so that layouts can share them. Unless replay is required, some records have experts for only half of their
    tokens, or none."""
    reference = Reference(model, None, trust_remote_code)
    layers = list(reference.routes(records[0]["input_ids"]).values())
    if how == "off" or not layers:
        return records
    experts, chosen = layers[0].logits.shape[1], len(layers[0].own[0])
    drawn = []
    for number, record in enumerate(records):
        ids, rows = record["input_ids"], []
        for end in range(1, len(ids)):
            draw = random.Random(f"{seed} {ids[:end]}")
            rows.append([draw.sample(range(experts), chosen) for _ in layers])
        if how != "require" and number % 4 > 1:
            rows = rows[: len(rows) // 2] if number % 4 == 2 else []
        drawn.append(record | {ROUTES: rows} if rows else record)
    return drawn


def redraw_logprobs(
    model: Path,
    records: Sequence[Record],
    objective: Objective,
    seed: int,
    trust_remote_code: bool,
    adapter: Path | None = None,
    *,
    half_precision: bool = False,
    declared: dict[str, Any] | None = None,
) -> None:
    """Draw new sampler log-probs for the records, in place. They are on both sides of every bound of the objective, and
    so far from it that float32 rounding does not matter; with `half_precision`, nor does bfloat16 rounding. `declared`:
    the user's own fields, as in `data.fields`."""
    new = oracle_logprobs(Reference(model, None, trust_remote_code, adapter), list(records))
    documents = [read_document(record, 1.0, declared) for record in records]
    for spread in _SPREADS:
        draw = random.Random(seed)
        sides: dict[int, list[int]] = {}  # for each bound: the number of labels below and above
        for number, (document, values) in enumerate(zip(documents, new, strict=True)):
            document.old_logprobs = _draw_old(document, values, objective, number, spread, draw, half_precision)
            for place, (found, bound) in enumerate(_switches(objective, document, values)):
                counts = sides.setdefault(place, [0, 0])
                counts[0] += int((found < bound).sum())
                counts[1] += int((found > bound).sum())
        if all(min(counts) >= _ON_EACH_SIDE for counts in sides.values()):
            break
    for record, document in zip(records, documents, strict=True):
        old = iter(document.old_logprobs or [])
        record["logprobs"] = [next(old) if label else 0.0 for label in record["loss_mask"]]


def _draw_old(
    document: Document,
    new: Sequence[float],
    objective: Objective,
    number: int,
    spread: float,
    draw: random.Random,
    half_precision: bool,
) -> list[float]:
    """Draw the sampler's log-probs of a document. If there is a bound on whole documents, the mean log-ratio is placed
    on one side of it. Every label has independent noise around the mean."""
    if not new:
        return []
    at_rest, moved = (_switches(objective, replace(document, old_logprobs=[v - by for v in new]), new) for by in (0, 1))
    # Values of the whole document are equal for all labels, and depend on the mean log-ratio.
    slopes = [(bound, float(after[0] - before[0])) for (before, bound), (after, _) in zip(at_rest, moved, strict=True)]
    alone = half_precision and objective.whole_documents  # a document may have a single label
    whole = [
        (len(new) > 1 or alone) and bool((values == values[0]).all()) for values, _ in _noisy(objective, document, new)
    ]
    of_document = [each for each, same in zip(slopes, whole, strict=True) if same]
    clearances = [
        *((clearance for clearance in _CLEARANCES for _ in range(_FEW_ATTEMPTS)) if half_precision and slopes else ()),
        *(0.0 for _ in range(_ATTEMPTS)),
    ]
    size = spread if len(of_document) < len(slopes) or not slopes else 0.1
    noise, drawn_anew = [0.0] * len(new), [True] * len(new)
    for clearance in clearances:
        target = 0.0
        if of_document:
            # Alternate between outside and inside of each bound.
            bound, slope = of_document[number // 2 % len(of_document)]
            value = ((0.4 if number % 2 else 1.8) * bound) or (-_BESIDE_ZERO if number % 2 else _BESIDE_ZERO)
            if abs(value - bound) <= clearance:  # the clip is narrower than the clearance, so go outside
                value = bound + math.copysign(1.5 * clearance, bound)
            target = value / slope
        noise = [draw.gauss(0.0, size) if anew else kept for kept, anew in zip(noise, drawn_anew, strict=True)]
        mean = sum(noise) / len(noise) if of_document else 0.0
        old = [min(value - target - shift + mean, 0.0) for value, shift in zip(new, noise, strict=True)]
        found = _switches(objective, replace(document, old_logprobs=old), new)
        near = torch.zeros(len(new), dtype=torch.bool)
        for (values, bound), same in zip(found, whole, strict=True):
            near |= (values - bound).abs() <= max(1e-2 * abs(bound) + 1e-5, clearance if same else clearance / 2)
        if not near.any():
            return old
        # With a clearance, few draws of a whole document are clear of all bounds. Labels that are clear keep their
        # noise.
        drawn_anew = near.tolist() if clearance else [True] * len(new)
    raise AssertionError(f"no log-probs of {document.id} are clear of every bound of the loss")


def _noisy(objective: Objective, document: Document, new: Sequence[float]) -> list[Switch]:
    old = [value - 0.01 * place for place, value in enumerate(new)]
    return _switches(objective, replace(document, old_logprobs=old), new)


def _switches(objective: Objective, document: Document, new: Sequence[float]) -> list[Switch]:
    """Return the values that the loss compares with bounds, and the bounds, given the policy's log-probs `new`."""
    if not new:
        return []
    zeros = torch.zeros(len(new), dtype=torch.float64)
    labels = document_labels(document, torch.tensor(new, dtype=torch.float64), zeros, zeros)
    return objective.switches(objective.prepare(labels))
