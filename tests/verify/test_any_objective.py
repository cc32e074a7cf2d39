"""Objectives drawn at random from all options that the losses have: what may stand together passes `verify`, and what
may not is refused in a sentence that names an option."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from selection import in_tiers
from truestep.config.load import ConfigError, dump_config, load_config
from truestep.config.schema import Config
from truestep.tools.verify.judge import verify
from truestep.tools.verify.report import complaints

EXAMPLES = Path(__file__).parents[2] / "examples"
LAYOUTS = ("one process", "smallest micro-batches", "head: 1 row a chunk", "context 2", "tensor 2", "FSDP 2")
TYPES = ("grpo", "gspo", "reinforce", "cispo", "sapo", "gmpo", "dppo", "cross_entropy", "custom")


def draw_loss(draw: random.Random, kind: str) -> dict[str, Any]:
    """Give a `loss` section. Each option is there by chance, whether it goes with the others or not."""

    def perhaps(chance: float, **options: Any) -> dict[str, Any]:
        return options if draw.random() < chance else {}

    loss: dict[str, Any] = {"type": kind}
    if kind == "custom":
        loss |= {"function": "examples.my_objective:Tanh", "options": {"sharpness": draw.choice([1.0, 3.0])}}
    if kind in ("grpo", "gspo", "cispo", "gmpo"):
        loss |= perhaps(0.5, epsilon_low=draw.choice([0.1, 0.3]), epsilon_high=draw.choice([0.1, 0.4]))
    if kind in ("grpo", "gspo"):
        loss |= perhaps(0.5, dual_clip=draw.choice([1.5, 3.0]))
    normalize_by = draw.choice(["labels", "documents", "document_means", "constant"])
    loss |= perhaps(0.8, normalize_by=normalize_by, **({"max_labels": 30} if normalize_by == "constant" else {}))
    loss |= perhaps(0.3, entropy_bonus=0.01) | perhaps(0.3, z_loss=0.001)
    loss |= perhaps(0.2, entropy_target={"entropy": 4.0, "largest_weight": 0.05})
    loss |= perhaps(0.3, entropy_normalize_by=draw.choice(["labels", "documents", "document_means"]))
    loss |= perhaps(0.3, gradient_divisor=draw.choice(["deepspeed", 4.0]))
    if kind == "cross_entropy":
        return loss
    loss |= perhaps(0.5, old_logprobs="recompute") | perhaps(0.3, off_policy_mask=draw.choice([0.0, 0.1]))
    correction = {
        "type": draw.choice(["truncate", "mask", "reject"]),
        "level": draw.choice(["label", "document", "document_mean"]),
        "high": draw.choice([1.2, 3.0]),
    } | perhaps(0.5, low=0.5)
    loss |= perhaps(0.5, correction=correction)
    divergence = {"weight": 0.1, "in": draw.choice(["loss", "reward"])} | perhaps(0.3, offload=True)
    divergence |= perhaps(0.5, estimator=draw.choice(["k1", "k2", "k3", "unbiased"]))
    loss |= perhaps(0.4, kl_reference=divergence)
    return loss | draw.choice([{}, {}, {"clip_cov": {"share": 0.1, "low": 0.1}}, {"kl_cov": {"share": 0.1}}])


def draw_config(seed: int, kind: str) -> tuple[Config, list[str]]:
    """Draw until a configuration is accepted; give the refusals on the way."""
    draw, refusals = random.Random(f"{kind} {seed}"), []
    base = load_config(EXAMPLES / "grpo.yaml").model_dump(exclude_unset=True)
    while True:
        options = base | {"loss": draw_loss(draw, kind)}
        options["schedule"] = base["schedule"] | {"updates_per_batch": draw.choice([1, 2])}
        options["model"] = base["model"] | {"dtype": "float32"}
        options["optimizer"] = base["optimizer"] | {"learning_rate": 0.01}
        try:
            return Config(**options), refusals
        except ConfigError as error:
            refusals.append(str(error))


@pytest.fixture(autouse=True)
def _examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("kind", TYPES)
def test_what_does_not_go_together_is_refused_by_name(kind: str) -> None:
    refused = [refusal for seed in range(20) for refusal in draw_config(seed, kind)[1]]
    assert refused
    for refusal in refused:
        assert refusal.startswith("Config: loss") and len(refusal) < 200, refusal


@pytest.mark.parametrize("kind", in_tiers(TYPES, (), ("gspo", "custom")))
def test_what_is_accepted_passes_verify(kind: str) -> None:
    config, _ = draw_config(0, kind)
    verdicts = verify(config, Path("out"), only=lambda layout: layout.name in LAYOUTS, documents=8)
    assert len(verdicts) == len(LAYOUTS)
    assert all(verdict.passed for verdict in verdicts), [dump_config(config), *map(complaints, verdicts)]
