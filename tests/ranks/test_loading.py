"""Every rank reads its own part of a model: the right bits, and no more memory than that and a little beside it."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from documents import same_bits
from ranks.cases import on_fresh_ranks, on_ranks
from selection import in_tiers
from tiny import KINDS, make_model
from truestep.model.loading.load import load_policy
from truestep.model.policy import Policy
from truestep.ranks.axes import RankLayout
from truestep.ranks.group import Ranks, join
from truestep.weights.lazy import Unread

MEGABYTE = 2**20


# ---- Bits


def run_of(size: int, parts: int, number: int) -> slice:
    """Equal runs, but for the last ones, which have less."""
    each = -(-size // parts)
    return slice(min(size, each * number), min(size, each * (number + 1)))


def expected_part(name: str, whole: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """By what a Megatron layer is, and not by any plan: columns of q, k, v, gate and up, rows of o and down."""
    number, inner = ranks.rank % ranks.tensor, name.split(".")[-2]
    if inner in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head"):
        whole = whole[run_of(whole.shape[0], ranks.tensor, number)]
    elif inner in ("o_proj", "down_proj") and name.endswith("weight"):
        whole = whole[:, run_of(whole.shape[1], ranks.tensor, number)]
    return whole[run_of(whole.shape[0], ranks.shards, ranks.rank // ranks.tensor % ranks.shards)]


def is_here(name: str, layers: int, tied: bool, ranks: Ranks) -> bool:
    """Of two layers or four, the first half is on the first rank of two: costs of tiny models allow no other cut."""
    if ranks.pipeline == 1:
        return True
    last = ranks.rank * ranks.pipeline // ranks.size == 1
    if ".layers." in name:
        return (int(name.split(".layers.")[1].split(".")[0]) >= layers // 2) is last
    return (name == "model.embed_tokens.weight" and (tied or not last)) or (last and "embed_tokens" not in name)


def check_parts(models: list[str], parallel: dict[str, int]) -> None:
    ranks = join(RankLayout(**parallel), device="cpu", stall_timeout=60)
    for model in models:
        policy = load_policy(model, device="cpu", ranks=ranks)
        whole = {name: value.float() for name, value in load_file(Path(model) / "model.safetensors").items()}
        layers, tied = policy.model.config.num_hidden_layers, "lm_head.weight" not in whole
        expected = {name for name in whole if is_here(name, layers, tied, ranks)}
        assert set(policy.weights.master) == expected, model
        for name, part in policy.weights.master.items():
            assert part.dtype == torch.float32
            assert same_bits(part.detach(), expected_part(name, whole[name], ranks)), (model, name)
        gc.collect()
        assert not any(type(kept) is Unread for kept in gc.get_objects()), "what is not here was let go of"


@pytest.mark.parametrize(
    ("size", "parallel"),
    in_tiers(
        [
            (2, {}),
            (2, {"tensor": 2}),
            (2, {"pipeline": 2}),
            (2, {"context": 2}),
            (4, {"tensor": 2, "pipeline": 2}),
            (4, {"tensor": 2}),
        ],
        [(4, {"tensor": 2, "pipeline": 2})],
        [(2, {"context": 2})],
    ),
    ids=["data", "tensor", "pipeline", "context", "tensor x pipeline", "data x tensor"],
)
def test_every_rank_has_its_part_of_the_file(size: int, parallel: dict[str, int], tmp_path: Path) -> None:
    """Stored in float32 and in half precision by turns."""
    stored = ("float32", "bfloat16", "float16")
    models = [
        str(make_model(tmp_path / kind, kind, dtype=stored[number % 3], num_hidden_layers=4))
        for number, kind in enumerate(KINDS)
    ]
    on_ranks(size, check_parts, models, parallel)


def check_joined(model: str, folder: str) -> None:
    ranks = join(RankLayout(), device="cpu", stall_timeout=60)
    weights = load_policy(model, device="cpu", ranks=ranks).weights
    torch.save({name: part.detach().clone() for name, part in weights.master.items()}, f"{folder}/{ranks.rank}.pt")


def test_tensors_that_transformers_joins_are_sharded(tmp_path: Path) -> None:
    """Three experts over two ranks, which the file has one by one."""
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
    few = {"num_key_value_heads": 2, "moe_intermediate_size": 24, "num_experts": 3, "num_experts_per_tok": 2}
    config = AutoConfig.for_model("qwen3_moe", **sizes, **few, intermediate_size=48, pad_token_id=None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    on_ranks(2, check_joined, str(tmp_path / "model"), str(tmp_path))
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert any("experts" in name and len(value) == 3 for name, value in model.named_parameters())
    for name, whole in model.named_parameters():
        assert same_bits(torch.cat([first[name], second[name]]), whole.detach()), name


# ---- Memory


def resident(what: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(what))


def own_bytes(policy: Policy) -> int:
    return sum(part.nbytes for part in policy.weights.master.values())


def measure(tiny: str, large: str, parallel: dict[str, int], output: str) -> None:
    """What loading takes at its peak, beyond what the process had when it had loaded a tiny model."""
    ranks = join(RankLayout(**parallel), device="cpu", stall_timeout=60)
    load_policy(tiny, device="cpu", ranks=ranks)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak begins anew
    before = resident("VmRSS")
    policy = load_policy(large, device="cpu", ranks=ranks)
    gradients = sum(part.grad.nbytes for part in policy.weights.master.values() if part.grad is not None)
    found = {"peak": resident("VmHWM") - before, "part": own_bytes(policy), "gradients": gradients}
    Path(f"{output}-{ranks.rank}").write_text(json.dumps(found), encoding="utf-8")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, int, int]:
    """384 MB of float32 in sixteen layers, stored in half of that; the bytes of all of it and of a layer."""
    directory = tmp_path_factory.mktemp("large") / "model"
    sizes = {"hidden_size": 768, "intermediate_size": 1536, "num_hidden_layers": 16, "num_attention_heads": 16}
    make_model(directory, "llama", dtype="bfloat16", num_key_value_heads=16, **sizes)
    tensors = load_file(directory / "model.safetensors")
    layer = sum(4 * value.numel() for name, value in tensors.items() if ".layers.3." in name)
    return str(directory), sum(4 * value.numel() for value in tensors.values()), layer


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells a process's peak")
@pytest.mark.parametrize(
    ("size", "parallel"),
    in_tiers(
        [(1, {}), (2, {}), (2, {"tensor": 2}), (2, {"pipeline": 2}), (2, {"context": 2}), (4, {"tensor": 2})],
        [],
        [(2, {}), (2, {"tensor": 2})],
    ),
    ids=["one", "data", "tensor", "pipeline", "context", "data x tensor"],
)
def test_a_rank_never_holds_more_than_its_part_and_a_layer(
    size: int, parallel: dict[str, int], large: tuple[str, int, int], tiny_model: Any, tmp_path: Path
) -> None:
    model, whole, layer = large

    def allowed(found: dict[str, float]) -> float:
        # A layer while the model is probed, or as much of the file as is mapped at a time, and the process's own.
        return found["part"] + found["gradients"] + layer + 64 * MEGABYTE

    for _ in range(3):  # the kernel maps more of a file around what is read than was asked for, now more, now less
        on_fresh_ranks(size, measure, str(tiny_model("llama")), model, parallel, str(tmp_path / "found"))
        of_ranks = [json.loads((tmp_path / f"found-{rank}").read_text(encoding="utf-8")) for rank in range(size)]
        if all(found["peak"] <= allowed(found) for found in of_ranks):
            break
    for found in of_ranks:
        assert found["part"] <= 1.02 * whole / size
        assert found["peak"] <= allowed(found), {name: value / MEGABYTE for name, value in found.items()}
        assert size == 1 or found["part"] + layer + 64 * MEGABYTE < 0.85 * whole
