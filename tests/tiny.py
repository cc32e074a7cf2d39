"""Tiny real Hugging Face models and varied rollout records for the tests.

Nothing here knows the trainer: a model is a directory that transformers wrote, a record is a plain dict as
one line of a rollout file would be (docs/contract.md, section 3).

Lengths: T tokens of a document, N_d labels of a document (positions whose mask is 1, never position 0).
"""

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

Record = dict[str, Any]

VOCABULARY = 61  # a prime: no block, shard or chunk size divides it

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    # A token that rollouts hold: transformers gives its row of the embedding no gradient unless it is told to.
    "pad_token_id": 7,
    "bos_token_id": 0,
    "eos_token_id": 1,
}

# Kinds whose head dimension is not hidden_size / heads (real Qwen3 0.6B and Gemma2 are such) keep that trait here.
_KINDS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "qwen2": {"model_type": "qwen2", "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}},
    "qwen3": {
        "model_type": "qwen3",
        "head_dim": 16,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    "qwen3_tied": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "sliding_window": 5},
    "gemma2": {
        "model_type": "gemma2",
        "head_dim": 16,
        "query_pre_attn_scalar": 12,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
        "sliding_window": 5,
        "tie_word_embeddings": True,
    },
    "granite": {
        "model_type": "granite",
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.6,
        "attention_multiplier": 0.3,
        "logits_scaling": 1.7,
    },
}

KINDS: tuple[str, ...] = tuple(_KINDS)


def make_model(directory: str | Path, kind: str, *, seed: int = 0, dtype: str = "float32", **config_overrides) -> Path:
    """Write a random tiny model of `kind` (see KINDS) as a Hugging Face directory and return its path.

    `dtype` is the type of the stored weights. `config_overrides` are fields of the model's config.json.
    """
    directory = Path(directory)
    config = AutoConfig.for_model(**{**_COMMON, **_KINDS[kind], **config_overrides})
    with torch.random.fork_rng(devices=[]):  # from_config draws from the global generator; leave the caller's alone
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # a tied tensor appears once
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                identity = 0.0 if config.model_type == "gemma2" else 1.0  # Gemma2 multiplies by 1 + w
                parameter.copy_(identity + 0.2 * noise)
            else:
                parameter.copy_(0.15 * noise)
    model.to(getattr(torch, dtype)).save_pretrained(directory)
    return directory


def make_records(
    seed: int,
    *,
    documents: int = 12,
    vocabulary: int = VOCABULARY,
    max_length: int = 24,
    advantages: str = "given",
    group_size: int = 4,
    temperatures: bool = True,
    versions: bool = True,
    with_logprobs: bool = True,
) -> list[Record]:
    """Valid rollout records of every shape that docs/contract.md, section 3, allows.

    Of every six documents: one with a plain prompt, one with several label spans, one without any label, one with
    a single label, one of `max_length` tokens, one whose every token but the first is a label. The other traits
    cycle with other periods so that they meet in many combinations.

    `advantages`: "given" (a number, one per label or one per token, most records a reward beside it), "rewards"
    (reward and group_id alone; groups of `group_size`, the last document in a group of its own) or "none".
    `max_length` is at least 8.
    The log-probs are arbitrary valid numbers; `set_old_logprobs` puts them near a model's own.
    """
    generator = random.Random(seed)
    records = []
    for index in range(documents):
        mask = _make_mask(index, max_length, generator)
        length, num_labels = len(mask), sum(mask)
        record: Record = {
            "id": f"document-{seed}-{index}",
            "input_ids": [generator.randrange(vocabulary) for _ in range(length)],
        }

        prompt_length = length - num_labels
        if mask == [0] * prompt_length + [1] * num_labels and index % 2 == 0:
            record["prompt_length"] = prompt_length
        else:
            record["loss_mask"] = mask

        if with_logprobs:
            label_values = [-generator.uniform(0.5, 6.0) for _ in range(num_labels)]
            record["logprobs"] = _one_per_token(mask, label_values, index) if index % 4 in (0, 3) else label_values

        if advantages == "given":
            record.update(_make_advantage(index, mask, generator))
            if index % 3 != 2:
                record["reward"] = round(generator.uniform(-1.0, 2.0), 3)
        elif advantages == "rewards":
            record["reward"] = round(generator.uniform(-1.0, 2.0), 3)
            alone = index == documents - 1
            record["group_id"] = "alone" if alone else f"prompt-{index // group_size}"
        elif advantages != "none":
            raise ValueError(f"advantages: {advantages}")

        temperature = (None, 0.7, 1.3, None, 1.0)[index % 5]
        if temperatures and temperature is not None:
            record["temperature"] = temperature
        if versions and index % 4 != 3:
            version = generator.randrange(0, 64)
            # One version per token where the weights changed while the document was sampled.
            record["model_version"] = (
                [version + position // 3 for position in range(length)] if index % 4 == 1 else version
            )
        if index % 3 == 0:
            record["metadata"] = {"source": "tiny", "index": index}
        records.append(record)
    return records


def label_positions(record: Record) -> list[int]:
    """Positions of the tokens whose log-prob is trained on."""
    if "loss_mask" in record:
        return [position for position, value in enumerate(record["loss_mask"]) if value == 1]
    return list(range(record["prompt_length"], len(record["input_ids"])))


def set_old_logprobs(
    records: list[Record],
    logprobs_per_document: Sequence[Sequence[float]],
    *,
    seed: int = 0,
    spread: float = 0.3,
    level: str = "label",
    bounds: Sequence[float] = (0.8, 1.2),
    margin: float = 0.05,
) -> list[Record]:
    """Make the sampler's log-probs of `records` the given new ones plus noise, in place; returns `records`.

    level "label": every label's log-ratio is drawn with standard deviation `spread`, so that over a list of records
    the ratios lie below, between and above `bounds`. level "document": the geometric mean ratio R_d of gspo cycles
    through below, inside twice, and above `bounds`, and `spread` is the noise of the labels around it.

    No (document) ratio comes close to a bound: |log ratio - log bound| >= margin * |log bound|. Otherwise float32
    rounding would decide which side it is on, and a test would compare two right answers. For dual_clip, ratio_cap
    and cispo put their bounds into `bounds` too (level "document" takes exactly two). Values off the mask are left
    as they were; log-probs stay <= 0.
    """
    generator = random.Random(seed)
    log_bounds = [math.log(bound) for bound in bounds if bound > 0]
    with_labels = 0
    for record, new_logprobs in zip(records, logprobs_per_document, strict=True):
        positions = label_positions(record)
        if len(new_logprobs) != len(positions):
            raise ValueError(f"{record.get('id')}: {len(new_logprobs)} log-probs for {len(positions)} labels")
        if not positions:
            continue
        if level == "label":
            log_ratios = [_draw_log_ratio(generator, spread, new, log_bounds, margin) for new in new_logprobs]
        elif level == "document":
            log_low, log_high = log_bounds
            target = (1.8 * log_low, 0.5 * log_high, 1.8 * log_high, 0.5 * log_low)[with_labels % 4]
            log_ratios = _draw_document_log_ratios(generator, spread, new_logprobs, target)
        else:
            raise ValueError(f"level: {level}")
        with_labels += 1

        label_values = [float(new) - ratio for new, ratio in zip(new_logprobs, log_ratios, strict=True)]
        stored = record.get("logprobs", [])
        if len(stored) == len(record["input_ids"]):
            for position, value in zip(positions, label_values, strict=True):
                stored[position] = value
        else:
            record["logprobs"] = label_values
    return records


def _make_mask(index: int, max_length: int, generator: random.Random) -> list[int]:
    shape = index % 6
    second_round = index // 6 % 2 == 1
    length = generator.randint(max(6, max_length // 3), max_length - 1)
    if shape == 0:  # a prompt and its completion
        prompt_length = generator.randint(2, length - 3)
        return [0] * prompt_length + [1] * (length - prompt_length)
    if shape == 1:  # several turns
        return _make_spans(length, generator)
    if shape == 2:  # no label; the shortest document there is, in every second round
        return [0] if second_round else [0] * length
    if shape == 3:  # one label: at the end, or the only token that has a predecessor
        return [0, 1] if second_round else [0] * (length - 1) + [1]
    if shape == 4:
        return _make_spans(max_length, generator)
    return [0] + [1] * (length - 1)


def _make_spans(length: int, generator: random.Random) -> list[int]:
    """Turns of 1 to 4 tokens, at least two of them labels."""
    while True:
        mask: list[int] = []
        value = 0
        while len(mask) < length:
            mask.extend([value] * generator.randint(1, 4))
            value = 1 - value
        mask = mask[:length]
        if "".join(map(str, mask)).count("01") >= 2:
            return mask


def _one_per_token(mask: list[int], label_values: list[float], index: int) -> list[float | None]:
    """As long as the input; what is off the mask must never matter, so it is as hostile as the format permits."""
    junk = (math.nan, None, math.inf, -math.inf, 3.0, 0.0)
    values = iter(label_values)
    return [next(values) if value else junk[(position + index) % len(junk)] for position, value in enumerate(mask)]


def _make_advantage(index: int, mask: list[int], generator: random.Random) -> Record:
    def draw() -> float:
        # Away from 0, either sign: an advantage of 0 would hide every error of its label.
        return round(generator.choice((-1.0, 1.0)) * generator.uniform(0.3, 2.0), 3)

    if index % 5 == 3:
        return {"advantage": [draw() for value in mask if value]}
    if index % 5 == 4:
        return {"advantage": [draw() if value else 77.0 for value in mask]}  # 77 would show in max_advantage
    return {"advantage": draw()}


def _draw_log_ratio(
    generator: random.Random, spread: float, new_logprob: float, log_bounds: list[float], margin: float
) -> float:
    for _ in range(10_000):
        log_ratio = generator.gauss(0.0, spread)
        if new_logprob - log_ratio > 0.0:  # the old log-prob may not be positive
            log_ratio = -log_ratio
        if all(abs(log_ratio - bound) >= margin * abs(bound) for bound in log_bounds):
            return log_ratio
    raise RuntimeError("no log-ratio is far enough from every bound: lower `margin` or raise `spread`")


def _draw_document_log_ratios(
    generator: random.Random, spread: float, new_logprobs: Sequence[float], target: float
) -> list[float]:
    for _ in range(1000):
        noise = [generator.gauss(0.0, spread) for _ in new_logprobs]
        mean_noise = sum(noise) / len(noise)
        log_ratios = [target + value - mean_noise for value in noise]
        if all(new - ratio <= 0.0 for new, ratio in zip(new_logprobs, log_ratios, strict=True)):
            return log_ratios
    raise RuntimeError("no noise keeps the old log-probs <= 0: lower `spread`")


def expert_model(directory: Path) -> Path:
    """Make a tiny mixture of experts, whose weights a file has expert by expert."""
    config = Qwen3MoeConfig(
        vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, max_position_embeddings=256, pad_token_id=7,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(directory)
    return directory
