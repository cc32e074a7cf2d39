"""Experts divided over ranks: values and gradients of each family's own block against plain float64 loops."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from checkpoints import latest, read_states, read_weights
from model.test_experts import FAMILIES, block_of
from oracles import experts as oracle
from ranks.cases import on_ranks, score_all, train_all, train_and_keep
from ranks.test_layouts import options, read
from ranks.test_train_over_ranks import config
from scoring import write_records
from small_runs import read_lines, write_rollouts
from tiny import expert_model, make_records
from truestep.config.schema import Config
from truestep.model.experts.grouped import group_experts
from truestep.model.experts.over_ranks import ExpertRanks
from truestep.model.fast import compiled
from truestep.model.loading.load import load_policy
from truestep.model.tensor_stream import TensorStream
from truestep.plan.advice import layout_of
from truestep.plan.memory import ACTIVATIONS, GRADIENTS, MASTERS, UNREDUCED, WEIGHTS, plan_memory
from truestep.plan.shape import read_shape
from truestep.ranks.axes import RankLayout
from truestep.ranks.group import join
from truestep.tools.export import export
from truestep.tools.score import score
from truestep.weights.errors import ModelError

TOLERANCE = 1e-5
EVEN = (5, 5, 5, 5)
UNEVEN = (7, 0, 2, 1)  # a rank without a token, and fewer tokens than experts
ODD: dict[str, int] = {"hidden_size": 31, "moe_intermediate_size": 13, "intermediate_size": 13}


def tokens_of(config: Any, sizes: tuple[int, ...]) -> list[torch.Tensor]:
    every = torch.randn(sum(sizes), config.hidden_size, generator=torch.Generator().manual_seed(1))
    return list(every.split(sizes))


def divide(block: Any, group: Any) -> slice:
    """Leave this rank's experts in a block. Return which they are."""
    ranks, own = dist.get_world_size(group), dist.get_rank(group)
    each = block.experts.num_experts // ranks
    mine = slice(each * own, each * (own + 1))
    for name, weight in list(block.experts.named_parameters()):
        setattr(block.experts, name, torch.nn.Parameter(weight.detach()[mine].clone()))
    return mine


def to_one_expert(block: Any) -> None:
    """Let all tokens choose the first two experts."""
    router = getattr(block, "gate", getattr(block, "router", None))
    with torch.no_grad():
        router.weight[:2], router.weight[2:] = 0.1, -0.1
        for bias in (*block.buffers(), *(p for n, p in router.named_parameters() if n == "bias")):
            bias.zero_()


def relative(found: torch.Tensor, expected: torch.Tensor, floor: float) -> float:
    difference = float((found.detach().double() - expected.detach()).norm())
    return difference / max(float(expected.norm()), floor, 1e-30)


def compare(family: str, sizes: dict[str, int], tokens: tuple[int, ...], one_expert: bool) -> None:
    ranks = join(RankLayout(expert=len(tokens)), device="cpu", stall_timeout=60)
    block, config = block_of(family, **sizes)
    if one_expert:
        to_one_expert(block)
    xs = tokens_of(config, tokens)
    if one_expert:
        xs = [x.abs() for x in xs]
    slopes = [torch.randn(x.shape, generator=torch.Generator().manual_seed(5 + n)) for n, x in enumerate(xs)]
    exact = {name: value.detach().double().requires_grad_() for name, value in block.state_dict().items()}
    xs64 = [x.double().requires_grad_() for x in xs]
    expected = [oracle.outputs(family, config, exact, x)[0] if len(x) else x for x in xs64]
    sum((y * slope.double()).sum() for y, slope in zip(expected, slopes, strict=True)).backward()  # type: ignore

    group_experts(block)
    mine = divide(block, ranks.group("expert"))
    block.experts.ranks = ExpertRanks(ranks.group("expert"))
    x = xs[ranks.rank].clone().requires_grad_()
    output = block(x[None])
    output = (output[0] if isinstance(output, tuple) else output)[0]
    (output * slopes[ranks.rank]).sum().backward()

    own64 = xs64[ranks.rank]
    scale = max(float(value.grad.norm()) for value in exact.values() if value.grad is not None)
    found = {
        "output": relative(output, expected[ranks.rank], 0.0),
        "input": 0.0 if own64.grad is None else relative(x.grad, own64.grad, 1e-3),
    }
    for name, weight in block.named_parameters():
        gradient, whole = weight.grad, exact[name].grad
        assert gradient is not None, name
        if name.startswith("experts."):
            whole = whole[mine]
        else:  # every rank has a part, of its own tokens
            dist.all_reduce(gradient, group=ranks.group("expert"))
        found[name] = relative(gradient, whole, 1e-3 * scale)
    wrong = {name: value for name, value in found.items() if not value <= TOLERANCE}
    assert not wrong, wrong
    if one_expert and mine.start >= 2:
        assert not block.experts.down_proj.grad.any()


def compare_all(family: str, many: int) -> None:
    compare(family, {}, EVEN[:many], False)
    compare(family, ODD, UNEVEN[:many], False)
    compare(family, {}, UNEVEN[-many:], True)


@pytest.mark.parametrize("many", [2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_are_those_of_plain_loops(family: str, many: int) -> None:
    on_ranks(many, compare_all, family, many)


def copies_are_told() -> None:
    """Against loops over all tokens of all ranks."""
    ranks = join(RankLayout(expert=3), device="cpu", stall_timeout=60)
    together, each = ExpertRanks(ranks.group("expert")), 2
    draw = torch.Generator().manual_seed(7)
    indices = [torch.rand(tokens, 6, generator=draw).argsort(1)[:, :3] for tokens in (5, 0, 8)]
    order, sent, counts, arrived = torch.ops.truestep.choices_over_ranks(indices[ranks.rank], each, together.number)

    def copies(source: int, there: int) -> list[tuple[int, list[int]]]:
        """The tokens of a rank that go to another one, each once, and their experts there."""
        found = [(t, [e % each for e in row if e // each == there]) for t, row in enumerate(indices[source].tolist())]
        return [(token, experts) for token, experts in found if experts]

    going = [copies(ranks.rank, there) for there in range(3)]
    coming = [copies(source, ranks.rank) for source in range(3)]
    assert sent.tolist() == [token for rank in going for token, _ in rank]
    sizes = [[len(rank), sum(len(experts) for _, experts in rank)] for way in (going, coming) for rank in way]
    assert counts.tolist() == torch.tensor(sizes).view(2, 3, 2).transpose(1, 2).reshape(4, 3).tolist()
    every = [experts for rank in coming for _, experts in rank]
    assert arrived.T.tolist() == [[expert, number] for number, experts in enumerate(every) for expert in experts]
    assert sorted(order.tolist()) == list(range(indices[ranks.rank].numel()))


def test_a_token_goes_once_to_each_rank_that_has_experts_of_it() -> None:
    on_ranks(3, copies_are_told)


# ---- A whole model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return expert_model(tmp_path_factory.mktemp("experts"))


def score_and_count(runs: list[tuple[dict[str, Any], str]]) -> None:
    """Score, and see that ranks tell each other a layer's choices once a micro-batch, also where it is recomputed."""
    layers, messages = 2, 2  # how many copies and choices come; and which
    compiled.BACKEND = "aot_eager"
    honest = dist.all_to_all_single
    for given, output in runs:
        told: list[int] = []

        def counted(received: Any, sent: Any, *others: Any, told: list[int] = told, **named: Any) -> Any:
            told.extend([1] if sent.dtype == torch.int64 and _trains() else [])
            return honest(received, sent, *others, **named)

        dist.all_to_all_single = counted
        step = score(Config.model_validate(given), Path(output), gradients=True).step
        dist.all_to_all_single = honest
        assert len(told) == layers * messages * step["num_micro_batches"]


def _trains() -> bool:
    """Choices are made without gradients: this looks for the pass of a micro-batch."""
    return any(frame.function == "run" and frame.filename.endswith("passes.py") for frame in inspect.stack(0))


def case_of(model: Path, folder: Path, parallel: dict[str, int]) -> dict[str, Any]:
    rollouts = write_records(folder / "rollouts.jsonl", make_records(11, documents=13))
    return options(model, rollouts, {"type": "cross_entropy"}, (parallel, 1, 64))


def gradient_distance(output: Path, exact: Path) -> float:
    """Of all gradients together, relative."""
    mine, theirs = read(output).gradients, read(exact).gradients
    assert mine.keys() == theirs.keys()
    squares = sum(float((mine[name].double() - value.double()).square().sum()) for name, value in theirs.items())
    return (squares / sum(float(value.double().square().sum()) for value in theirs.values())) ** 0.5


@pytest.mark.long
@pytest.mark.parametrize("parallel", [{"expert": 2}, {"expert": 2, "tensor": 2}])
def test_recomputed_layers_tell_their_choices_once(parallel: dict[str, int], model: Path, tmp_path: Path) -> None:
    plain = case_of(model, tmp_path, parallel)
    ways: list[dict[str, Any]] = [{}, *({"activation_checkpointing": how} for how in ("full", "selective"))]
    ways += [] if "tensor" in parallel else [{"compile": True}, {"compile": True, "activation_checkpointing": "full"}]
    runs = [(plain | {"model": {**plain["model"], **way}}, str(tmp_path / str(n))) for n, way in enumerate(ways)]
    on_ranks(2, score_and_count, runs)
    on_ranks(1, score_all, [(plain | {"parallel": {}}, str(tmp_path / "one"))])
    for _, output in runs:
        assert gradient_distance(Path(output), tmp_path / "one") <= TOLERANCE, output
        pairs = zip(read(Path(output)).documents, read(tmp_path / "one").documents, strict=True)
        assert all(mine["logprobs"] == pytest.approx(theirs["logprobs"], abs=TOLERANCE) for mine, theirs in pairs)


def test_half_precision_sums_over_ranks_in_float32(model: Path, tmp_path: Path) -> None:
    """The error against float32 is at most 1.5 times that of one process."""
    plain = case_of(model, tmp_path, {"expert": 2})
    half = plain | {"model": {**plain["model"], "dtype": "bfloat16", "head": {"fp32_lm_head": True}}}
    on_ranks(2, score_all, [(half, str(tmp_path / "two"))])
    alone = {"parallel": {}}
    on_ranks(1, score_all, [(half | alone, str(tmp_path / "one")), (plain | alone, str(tmp_path / "exact"))])
    exact = tmp_path / "exact"
    assert 1e-4 < gradient_distance(tmp_path / "two", exact) <= 1.5 * gradient_distance(tmp_path / "one", exact)


def give_and_keep(model: str, file: str) -> None:
    ranks = join(RankLayout(expert=2), device="cpu", stall_timeout=60)
    policy = load_policy(model, device="cpu", ranks=ranks)
    found: dict[str, torch.Tensor] = {}
    TensorStream(policy, torch.float32).give(lambda group: found.update(group))
    if ranks.first:
        save_file({name: value.clone() for name, value in found.items()}, file)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_what_is_published_is_what_was_read(ranks: int, model: Path, tmp_path: Path) -> None:
    on_ranks(ranks, give_and_keep, str(model), str(tmp_path / "given.safetensors"))
    given, own = load_file(tmp_path / "given.safetensors"), load_file(model / "model.safetensors")
    assert given.keys() == own.keys()
    assert all(torch.equal(given[name], value) for name, value in own.items())


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
def test_from_four_expert_ranks_to_tensor_ranks_to_one_process(optimizer: str, model: Path, tmp_path: Path) -> None:
    write_rollouts(tmp_path / "rollouts.jsonl", 49)

    def given(run: str, steps: int, **parallel: int) -> dict[str, Any]:
        sections = {"optimizer": {"type": optimizer}, "parallel": parallel, "schedule": {"steps": steps}}
        return config(model, tmp_path / "rollouts.jsonl", tmp_path / run, **sections)

    on_ranks(4, train_all, [given("moved", 2, expert=4), given("moved", 3, expert=2)])
    parts = sorted((latest(tmp_path / "moved") / "truestep").glob("part-*"))
    sizes = [file.stat().st_size for file in parts]
    assert len(parts) == 4 and max(sizes) < 0.4 * sum(sizes), "each rank writes its own part"
    on_ranks(2, train_all, [given("moved", 5, tensor=2, expert=2), given("moved", 6, context=2, expert=2)])
    on_ranks(1, train_all, [given("moved", 7), given("still", 7)])
    moved, still = tmp_path / "moved", tmp_path / "still"
    assert read_lines(moved / "ledger.jsonl") == read_lines(still / "ledger.jsonl")
    most = 1e-5 if optimizer == "adamw" else 1e-3  # another rounding of a sum may choose the neighbour of a level
    for tensors in (read_weights, read_states):
        mine, theirs = tensors(latest(moved)), tensors(latest(still))
        assert {name: value.shape for name, value in mine.items()} == {n: v.shape for n, v in theirs.items()}
    for name, value in read_weights(latest(still)).items():
        assert (read_weights(latest(moved))[name] - value).norm() <= most * value.norm(), name


@pytest.mark.long
def test_a_run_goes_on_bit_by_bit_and_is_exported_whole(model: Path, tmp_path: Path) -> None:
    write_rollouts(tmp_path / "rollouts.jsonl", 28)

    def given(run: str, steps: int) -> dict[str, Any]:
        sections = {"parallel": {"expert": 2}, "schedule": {"steps": steps}, "deterministic": True}
        return config(model, tmp_path / "rollouts.jsonl", tmp_path / run, **sections)

    on_ranks(2, train_all, [given("stopped", 2), given("stopped", 4), given("whole", 4)])
    stopped, whole = (latest(tmp_path / run) for run in ("stopped", "whole"))
    for tensors in (read_weights, read_states):
        mine, theirs = tensors(stopped), tensors(whole)
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in theirs)
    export(tmp_path / "whole", tmp_path / "out", "float32")
    exported, own = load_file(tmp_path / "out" / "model.safetensors"), load_file(model / "model.safetensors")
    assert {name: value.shape for name, value in exported.items()} == {name: value.shape for name, value in own.items()}


def refused(directory: str, experts: int, reason: str) -> None:
    ranks = join(RankLayout(expert=experts), device="cpu", stall_timeout=60)
    with pytest.raises(ModelError, match=reason):
        load_policy(directory, device="cpu", ranks=ranks)


def test_models_without_experts_that_ranks_divide_are_refused(
    model: Path, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    dense = "parallel.expert: 2: LlamaForCausalLM has no experts that truestep recognises"
    on_ranks(2, refused, str(tiny_model("llama")), 2, dense)
    on_ranks(3, refused, str(model), 3, "3 ranks do not divide the 4 experts of model.layers.0.mlp.experts")


def test_the_plan_counts_a_ranks_own_numbers(model: Path, tmp_path: Path) -> None:
    write_rollouts(tmp_path / "rollouts.jsonl", 14)
    sections = {"parallel": {"expert": 2}, "schedule": {"steps": 1}}
    given = config(model, tmp_path / "rollouts.jsonl", tmp_path / "run", **sections)
    on_ranks(2, train_and_keep, given, str(tmp_path))
    settings = Config.model_validate(given)
    shape = read_shape(settings)
    (planned,) = plan_memory(settings, shape, layout_of(settings, 2))
    masters = [torch.load(tmp_path / f"{rank}.pt")["master"] for rank in range(2)]
    sizes = [4 * sum(value.numel() for value in own.values()) for own in masters]
    assert planned.kinds[MASTERS] == planned.kinds[GRADIENTS] == sum(sizes) / 2
    whole = plan_memory(settings, shape, layout_of(settings.changed({"parallel.expert": 1}), 2))[0].kinds
    divided = sum(value.numel() for name, value in masters[0].items() if ".experts." in name)
    assert whole[UNREDUCED] - planned.kinds[UNREDUCED] == 4 * divided, "each rank has half of the experts"
    assert whole[WEIGHTS] - planned.kinds[WEIGHTS] == 4 * divided  # two layers of two are gathered at a time
    assert planned.kinds[ACTIVATIONS] > whole[ACTIVATIONS], "copies of tokens"
