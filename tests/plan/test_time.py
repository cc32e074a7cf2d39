"""Planned times, held against those that were measured on GPUs, and the parts of a step by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from plan.shapes import ADAPTED_BIG, ADAPTED_BIGGER, BIG, H100, H200, MIDDLE, SMALL, THIRD, config_of
from truestep.config.schema import Config
from truestep.plan.advice import changed_plainly, layout_of
from truestep.plan.cost import SharedPrompt, StepTime, Work, plan_time
from truestep.plan.rates import Rates
from truestep.plan.shape import ModelShape, shape_of
from truestep.rollouts.prefixes import find_segments

K16 = {"tokens": 16384, "attention": "torch"}
FAST = {**K16, "compile": True}
FLASH = {**FAST, "attention": "flash"}
RECOMPUTED = {**K16, "activation_checkpointing": "full"}
FITS = {**FAST, **RECOMPUTED}
FULL = Work(65_536, 32_768, 1_024)
THOUSANDS = Work(63_569, 31_800, 1_053)  # documents of 600 to 1,400 tokens: the mean over tokens
LOG_NORMAL = Work(63_569, 31_800, 2_700)
LONG = Work(65_536, 65_532, 16_384)
DOCUMENT = Work(32_768, 16_384, 32_768)
WIDE: dict[str, Any] = {**FLASH, "tokens": 24_576}


def groups(prompt: int, answer: int, count: int = 4, shared: bool = True) -> Work:
    """Return `count` groups of eight answers to a prompt."""
    documents, length = 8 * count, prompt + answer
    return Work(documents * length, documents * answer, length, SharedPrompt(prompt, 8) if shared else None)


def gemma2() -> ModelShape:
    config = transformers.Gemma2Config(
        vocab_size=128_000, hidden_size=3584, intermediate_size=14336, num_hidden_layers=8, num_attention_heads=16,
        num_key_value_heads=8, head_dim=256,
    )  # fmt: skip
    with torch.device("meta"):
        return shape_of(transformers.AutoModelForCausalLM.from_config(config))


# Runs on H200s (benchmarks/RESULTS.md, its history): the model, options, ranks, documents, and the seconds of a step.
MEASURED: dict[str, tuple[Any, dict[str, Any], int, Work, float]] = {
    "0.60B": (SMALL, K16, 1, THOUSANDS, 1.23),
    "0.60B, compiled": (SMALL, FAST, 1, THOUSANDS, 0.67),
    "1.72B, recomputed": (MIDDLE, RECOMPUTED, 1, THOUSANDS, 2.46),
    "1.72B, recomputed, compiled": (MIDDLE, {**FAST, **RECOMPUTED}, 1, THOUSANDS, 1.64),
    "1.72B, compiled, 1k": (MIDDLE, FAST, 1, THOUSANDS, 1.282),
    "1.72B, compiled, 1k, flash": (MIDDLE, FLASH, 1, THOUSANDS, 1.253),
    "1.72B, compiled, log-normal": (MIDDLE, FAST, 1, LOG_NORMAL, 1.661),
    "1.72B, compiled, log-normal, flash": (MIDDLE, FLASH, 1, LOG_NORMAL, 1.395),
    "1.72B, compiled, 16k": (MIDDLE, FAST, 1, LONG, 2.608),
    "1.72B, compiled, 16k, flash": (MIDDLE, FLASH, 1, LONG, 1.987),
    "8B, adapter, recomputed, compiled": (ADAPTED_BIG, {**FAST, **RECOMPUTED}, 1, THOUSANDS, 5.750),
    "weak scaling, 1": (MIDDLE, RECOMPUTED, 1, Work(65_536, 32_768, 1_053), 2.739),
    "weak scaling, 2": (MIDDLE, RECOMPUTED, 2, Work(131_072, 65_536, 1_053), 2.728),
    "weak scaling, 4": (MIDDLE, RECOMPUTED, 4, Work(262_144, 131_072, 1_053), 2.739),
    "data 4": (MIDDLE, {**RECOMPUTED, "tokens": 17_384}, 4, Work(64_000, 32_000, 1_080), 0.742),
    "context 4": (MIDDLE, {**RECOMPUTED, "tokens": 17_384, "context": 4}, 4, Work(64_000, 32_000, 1_080), 2.256),
    "tensor 4": (MIDDLE, {**RECOMPUTED, "tokens": 17_384, "tensor": 4}, 4, Work(64_000, 32_000, 1_080), 1.964),
    "pipeline 4": (MIDDLE, {**RECOMPUTED, "tokens": 17_384, "pipeline": 4}, 4, Work(64_000, 32_000, 1_080), 1.201),
    "context 2": (MIDDLE, {**RECOMPUTED, "tokens": 35_000, "context": 2}, 2, Work(63_248, 31_600, 1_080), 1.457),
    "tensor 2": (MIDDLE, {**RECOMPUTED, "tokens": 35_000, "tensor": 2}, 2, Work(63_409, 31_700, 1_080), 1.536),
    "32k, data 2": (MIDDLE, {**K16, "tokens": 32_768}, 2, Work(65_536, 32_768, 32_768), 2.308),
    "32k, context 2": (MIDDLE, {**K16, "tokens": 32_768, "context": 2}, 2, DOCUMENT, 1.229),
    "64k, context 2": (MIDDLE, {**K16, "tokens": 65_536, "context": 2}, 2, Work(65_536, 32_768, 65_536), 3.715),
    "8B, 8-bit states": (BIG, {**FITS, "optimizer": {"type": "adamw_8bit"}}, 1, FULL, 6.989),
    "8B, 8-bit states, all on the host, room of 16 GiB": (
        BIG,
        {**FITS, "optimizer": {"type": "adamw_8bit", "offload": "all", "offload_room": 16}},
        1,
        FULL,
        7.561,
    ),
    "8B, all on the host, room of 45 GiB": (
        BIG,
        {**FITS, "optimizer": {"offload": "all", "offload_room": 45}},
        1,
        FULL,
        8.431,
    ),
    # Planned before they were measured.
    "8B, all on the host": (BIG, {**FITS, "optimizer": {"offload": "all"}}, 1, FULL, 8.906),
    "32B, adapter": (ADAPTED_BIGGER, FITS, 1, Work(32_768, 16_384, 1_024), 11.966),
    "Gemma 2, all scores": (gemma2, {**FAST, "tokens": 8192}, 1, Work(32_768, 16_384, 8_192), 2.093),
    "1.72B, 2,048 + 512": (MIDDLE, WIDE, 1, groups(2048, 512, shared=False), 81_920 / 56_692),
    "1.72B, 2,048 + 512, shared": (MIDDLE, WIDE, 1, groups(2048, 512), 81_920 / 157_275),
    "1.72B, 8,192 + 512": (MIDDLE, WIDE, 1, groups(8192, 512, shared=False), 278_528 / 46_388),
    "1.72B, 8,192 + 512, shared": (MIDDLE, WIDE, 1, groups(8192, 512), 278_528 / 219_194),
    "1.72B, 512 + 2,048, shared": (MIDDLE, WIDE, 1, groups(512, 2048), 81_920 / 60_482),
    "1.72B, 128 + 512, shared": (MIDDLE, WIDE, 1, groups(128, 512), 20_480 / 63_388),
    "1.72B, 2,048 + 512, shared, 32 groups": (MIDDLE, WIDE, 1, groups(2048, 512, 32), 4.27),
    "Gemma 2, flash": (gemma2, {**FLASH, "tokens": 8192}, 1, Work(32_768, 16_384, 8_192), 0.776),
}

# And on one H100: how optimizers differ.
EIGHT_BITS: dict[str, Any] = {"type": "adamw_8bit"}
ALL: dict[str, Any] = {"offload": "all"}
MEASURED_ON_AN_H100: dict[str, tuple[ModelShape, dict[str, Any], float]] = {
    "0.60B": (SMALL, FITS, 1.109),
    "1.72B": (MIDDLE, FAST, 1.335),
    "1.72B, states on the host": (MIDDLE, {**FAST, "optimizer": {"offload": "states"}}, 1.394),
    "1.72B, all on the host": (MIDDLE, {**FAST, "optimizer": {"offload": "all"}}, 1.535),
    "1.72B, 8-bit states": (MIDDLE, {**FAST, "optimizer": EIGHT_BITS}, 1.403),
    "2.73B": (THIRD, FITS, 2.276),
    "2.73B, states on the host": (THIRD, {**FITS, "optimizer": {"offload": "states"}}, 2.736),
    "2.73B, all on the host": (THIRD, {**FITS, "optimizer": {"offload": "all"}}, 2.964),
    "2.73B, states on the host, room of 12 GiB": (
        THIRD,
        {**FITS, "optimizer": {"offload": "states", "offload_room": 12}},
        2.437,
    ),
    "2.73B, all on the host, room of 12 GiB": (THIRD, {**FITS, "optimizer": {**ALL, "offload_room": 12}}, 2.688),
    "2.73B, all on the host, room of 24 GiB": (THIRD, {**FITS, "optimizer": {**ALL, "offload_room": 24}}, 2.419),
    "2.73B, 8-bit states": (THIRD, {**FITS, "optimizer": EIGHT_BITS}, 2.309),
    "2.73B, 8-bit states, all on the host": (THIRD, {**FITS, "optimizer": {**EIGHT_BITS, "offload": "all"}}, 2.571),
}


def planned(shape: Any, options: dict[str, Any], ranks: int, work: Work, rates: Rates = H200) -> StepTime:
    shape = shape() if callable(shape) else shape
    config = config_of(**options)
    return plan_time(config, shape, layout_of(config, ranks), rates, work)


@pytest.mark.parametrize("name", MEASURED)
def test_planned_times_are_within_a_quarter_of_measured_ones(name: str) -> None:
    shape, options, ranks, work, measured = MEASURED[name]
    assert planned(shape, options, ranks, work).total == pytest.approx(measured, rel=0.25)


@pytest.mark.parametrize("name", MEASURED_ON_AN_H100)
def test_so_are_those_of_an_h100(name: str) -> None:
    shape, options, measured = MEASURED_ON_AN_H100[name]
    assert planned(shape, options, 1, THOUSANDS, H100).total == pytest.approx(measured, rel=0.25)


@pytest.mark.parametrize(("prompt", "answer", "group"), [(5, 3, 4), (1, 9, 2), (8, 1, 16)])
def test_a_shared_prompt_counts_once_as_it_does_in_a_run(prompt: int, answer: int, group: int) -> None:
    """The tokens, keys and copies that the plan counts are those of the segments that are trained."""
    documents = [np.array([*range(prompt), *(1000 + 100 * member + np.arange(answer))]) for member in range(group)]
    forest = find_segments(documents)
    length = prompt + answer
    work = Work(group * length, group * answer, length, SharedPrompt(prompt, group))
    assert work.computed == pytest.approx(forest.tokens)
    assert work.copied == pytest.approx(forest.path_tokens)
    # A token attends to half a key of its own more on average: causal attention over n tokens has n² / 2 pairs here.
    pairs = sum((segment.stop**2 - segment.start**2) / 2 for segment in forest.segments)
    assert work.reach * work.computed / 2 == pytest.approx(pairs)
    assert work.apart.reach * work.apart.computed / 2 == pytest.approx(group * length**2 / 2)


def test_auto_shares_a_prompt_where_that_takes_less_time() -> None:
    config = config_of(**WIDE)
    always, off = (changed_plainly(config, "data.share_prefixes", how) for how in ("always", "off"))

    def seconds(how: Config, work: Work) -> StepTime:
        return plan_time(how, MIDDLE, layout_of(how, 1), H200, work)

    long, short = groups(2048, 512), groups(2, 512)
    assert seconds(config, long) == seconds(always, long) and seconds(config, long).computed < 81_920 / 3
    assert seconds(config, short) == seconds(off, short.apart) != seconds(always, short)
    shape = SharedPrompt(2048, 8)
    assert Work.of(off, 1, 2560, shape).computed == 64 * 2560 > Work.of(config, 1, 2560, shape).computed
    assert Work.of(config, 1, 2560, shape).labels == pytest.approx(64 * 512)
