"""Experts as one computation: values and gradients against plain float64 loops, for each family's own block."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from families.compare import of_policy
from families.tiny_families import tiny_config
from interpreted import HALF, use
from oracles import experts as oracle
from tiny import expert_model
from truestep.model.experts import grouped
from truestep.model.experts.grouped import GroupedExperts, group_experts, is_experts
from truestep.model.experts.routers import RoutedLayers, check_settings, count_routes, make_routing
from truestep.model.experts.routing import ExpertSettings, OwnTokens
from truestep.model.fast.by_class import own_code
from truestep.model.loading.load import load_policy
from truestep.weights.errors import ModelError

FAMILIES = tuple(oracle.ROUTERS)
TOKENS = 11
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def experts_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return expert_model(tmp_path_factory.mktemp("experts"))


def block_of(family: str, **sizes: int) -> tuple[Any, Any]:
    """Make a family's block of experts and its router, with random weights, and the configuration."""
    config = tiny_config(family)
    for name, size in sizes.items():
        if hasattr(config, name):
            setattr(config, name, size)
    config.num_hidden_layers = 2
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        block = next(m for m in model.modules() if any(is_experts(child) for child in m.children()))
        with torch.no_grad():
            for value in (*block.parameters(), *block.buffers()):
                value.copy_(0.4 * torch.randn(value.shape))
    return block, config


def computed(block: Any, x: torch.Tensor) -> torch.Tensor:
    output = block(x[None])
    found: torch.Tensor = (output[0] if isinstance(output, tuple) else output)[0]
    return found


def compare(
    family: str, block: Any, config: Any, x: torch.Tensor, given: list[list[int] | None] | None = None
) -> list[list[int]]:
    """Compare a block's output and all gradients with the oracle's. Return the experts of each token."""
    slope = torch.randn(x.shape, generator=torch.Generator().manual_seed(5))
    x = x.clone().requires_grad_()
    output = computed(block, x)
    (output * slope).sum().backward()

    exact = {name: value.detach().double().requires_grad_() for name, value in block.state_dict().items()}
    x64 = x.detach().double().requires_grad_()
    expected, chosen = oracle.outputs(family, config, exact, x64, given)
    (expected * slope.double()).sum().backward()

    pairs = {"output": (output, expected), "input": (x.grad, x64.grad)}
    pairs |= {name: (value.grad, exact[name].grad) for name, value in block.named_parameters()}
    found = {
        name: [torch.zeros(()) if each is None else each.detach().double() for each in pair]
        for name, pair in pairs.items()
    }
    largest = max(float(theirs.norm()) for _, theirs in found.values())
    wrong = {
        name: float((ours - theirs).norm() / theirs.norm())
        for name, (ours, theirs) in found.items()
        if not (ours - theirs).norm() <= TOLERANCE * max(float(theirs.norm()), 1e-3 * largest)
    }
    assert not wrong
    return chosen


def random_tokens(config: Any, count: int = TOKENS) -> torch.Tensor:
    return torch.randn(count, config.hidden_size, generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


def test_values_and_gradients_are_those_of_plain_loops(family: str) -> None:
    block, config = block_of(family)
    group_experts(block)
    assert isinstance(block.experts, GroupedExperts)
    chosen = compare(family, block, config, random_tokens(config))
    assert len({number for numbers in chosen for number in numbers}) > 2, "tokens go to several experts"


def model_of(block: Any, config: Any) -> Any:
    """Make a model of one layer."""
    model = torch.nn.ModuleList([block])
    model.config = config
    return model


def routed_block(family: str) -> tuple[Any, Any, Any]:
    """Make a family's block whose router is counted and replayed, its configuration, and what it routes."""
    block, config = block_of(family)
    group_experts(block)
    model = model_of(block, config)
    count_routes(model)
    routing = make_routing(model, RoutedLayers.of(model), ExpertSettings(), {}, torch.device("cpu"))
    assert routing is not None and routing.shape is not None, "the family's router can be given experts"
    return block, config, routing


def test_given_experts_are_weighed_by_all_logits_with_their_gradient(family: str) -> None:
    """The router would have chosen others for most tokens, and one token has no route."""
    block, config, routing = routed_block(family)
    (experts,), chosen = routing.shape.experts, routing.shape.chosen
    generator = torch.Generator().manual_seed(9)
    named = torch.stack([torch.randperm(experts, generator=generator)[:chosen] for _ in range(TOKENS)])
    named[4] = -1
    given = [row.tolist() if row[0] >= 0 else None for row in named]
    x = random_tokens(config)
    with routing.passing(OwnTokens(TOKENS, routes=named[:, None].int()), counts=True):
        computed_ones = compare(family, block, config, x, given)
    assert all(row is None or row == found for row, found in zip(given, computed_ones, strict=True))
    own = oracle.outputs(family, config, {n: v.detach().double() for n, v in block.state_dict().items()}, x.double())[1]
    others = [len(set(row) - set(mine)) for row, mine in zip(given, own, strict=True) if row is not None]
    assert routing.layers["0.experts"].replayed.tolist() == [TOKENS - 1, sum(n > 0 for n in others), sum(others)]
    assert sum(others) > TOKENS // 2


def test_experts_that_the_router_chose_change_no_bit(family: str) -> None:
    block, config, routing = routed_block(family)
    x, found = random_tokens(config), []
    with routing.recording(lambda place, index: found.append((place, index))):
        expected = computed(block, x)
    ((place, index),) = found
    assert place == 0
    with routing.passing(OwnTokens(TOKENS, routes=index[:, None].flip(-1)), counts=True):
        block(x[None])
    with routing.passing(OwnTokens(TOKENS, routes=index[:, None]), counts=True):
        assert torch.equal(computed(block, x), expected)
    assert routing.layers["0.experts"].replayed.tolist() == [2 * TOKENS, 0, 0]


def test_a_router_that_cannot_be_given_experts_is_known() -> None:
    """Scores that were cut before the choice hold zeros for all others: they are no weights of given experts."""
    block, config = block_of("mixtral")

    def cut(router: Any, hidden_states: torch.Tensor) -> Any:
        logits = torch.nn.functional.linear(hidden_states, router.weight)
        values, index = logits.softmax(-1).sort(descending=True)
        values, index = values[:, : router.top_k], index[:, : router.top_k]
        return logits, values / values.sum(-1, keepdim=True), index

    block.gate.__class__ = type("Sorting", (type(block.gate),), {"forward": cut})
    group_experts(block)
    model = model_of(block, config)
    count_routes(model)
    assert RoutedLayers.of(model).shape.experts == ()
    with pytest.raises(ModelError, match=r"model\.experts\.replay: require: ModuleList has no routers, or none"):
        check_settings(model, ExpertSettings(replay="require"))


def test_widths_that_no_kernel_divides(family: str) -> None:
    block, config = block_of(family, hidden_size=31, moe_intermediate_size=13, intermediate_size=13)
    group_experts(block)
    compare(family, block, config, random_tokens(config))


def test_every_token_on_the_same_experts(family: str) -> None:
    """All others have no token: their gradients are 0."""
    block, config = block_of(family)
    group_experts(block)
    router = getattr(block, "gate", getattr(block, "router", None))
    tokens = random_tokens(config).abs()  # positive, so that the sign of a router's row decides
    with torch.no_grad():
        router.weight[:2], router.weight[2:] = 0.1, -0.1
        for bias in (*block.buffers(), *(p for n, p in router.named_parameters() if n == "bias")):
            bias.zero_()
    chosen = compare(family, block, config, tokens)
    assert {tuple(sorted(numbers)) for numbers in chosen} == {(0, 1)}
    assert not block.experts.down_proj.grad[2:].any()


def test_fewer_tokens_than_experts(family: str) -> None:
    block, config = block_of(family)
    group_experts(block)
    compare(family, block, config, random_tokens(config, 2))


def test_experts_of_another_form_keep_their_own_code() -> None:
    block, config = block_of("qwen3_moe")
    plain = copy.deepcopy(block)

    class Halved(type(block.experts)):  # type: ignore[misc]
        def forward(self, *given: Any) -> Any:
            return super().forward(*given) / 2

    block.experts.__class__ = Halved
    group_experts(block)
    assert type(block.experts) is Halved
    x = random_tokens(config)
    torch.testing.assert_close(computed(block, x) * 2, computed(plain, x))


def test_own_code_runs_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    block, config = block_of("qwen3_moe")
    x = random_tokens(config)
    expected = computed(block, x)
    group_experts(block)
    monkeypatch.setattr("truestep.model.experts.grouped.mixture", None)
    with own_code():
        assert torch.equal(computed(block, x), expected)
    with pytest.raises(TypeError):
        computed(block, x)


@pytest.mark.parametrize("how", [False, "full", "selective", "elementwise"])
def test_recomputed_layers_give_the_same_gradients(how: bool | str, experts_directory: Path) -> None:
    plain = of_policy(load_policy(experts_directory, device="cpu"))
    found = of_policy(load_policy(experts_directory, device="cpu", activation_checkpointing=how))
    assert torch.equal(found.logprobs, plain.logprobs)
    for name, gradient in plain.gradients.items():
        assert torch.equal(found.gradients[name], gradient), name


def test_selective_recomputation_keeps_choices(experts_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores that round otherwise when they are computed again change no choice: the order of rows was kept."""
    times: list[int] = []
    honest = grouped.mixture

    def seen(x: Any, index: Any, *others: Any) -> Any:
        times.append(1)
        layers, last = 2, 3
        return honest(x, (index - (last if len(times) > layers else 0)).abs(), *others)

    plain = of_policy(load_policy(experts_directory, device="cpu"))
    policy = load_policy(experts_directory, device="cpu", activation_checkpointing="selective")
    monkeypatch.setattr(grouped, "mixture", seen)
    found = of_policy(policy)
    assert len(times) == 4, "each layer was computed again"
    for name, gradient in plain.gradients.items():
        assert torch.equal(found.gradients[name], gradient), name


def test_gradients_of_rounded_weights_are_summed_in_float32(experts_directory: Path) -> None:
    """A thousand small micro-batches after a large one: a sum in bfloat16 would stay where the first one left it."""
    policy = load_policy(experts_directory, device="cpu", dtype="bfloat16")
    name, module = next(grouped.grouped_in(policy.model))
    assert module.first_number is not None
    weights, parameter = policy.weights, module.down_proj
    weights.zero_gradients()
    gradient, rows = torch.ones(1, 32, dtype=torch.bfloat16), torch.ones(1, 16, dtype=torch.bfloat16)
    ends = torch.tensor([0, 1, 1, 1], dtype=torch.int32)
    for number in range(1001):
        scale = 1.0 if number == 0 else 2.0**-10
        given = gradient * scale, rows, parameter, ends, True, module.last_number, number
        assert torch.equal(torch.ops.truestep.grouped_backward(*given), given[0] @ parameter[1])
    found = weights.gradients[f"{name}.down_proj"]
    assert torch.equal(found[1], torch.full_like(found[1], 1 + 1000 * 2.0**-10))
    assert not found[0].any() and not found[2:].any()
    assert parameter.grad is None


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compiled_layers_compute_what_plain_layers_do(
    dtype: str, backend: str, experts_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("truestep.model.fast.compiled.BACKEND", backend)
    plain = of_policy(load_policy(experts_directory, device="cpu", dtype=dtype))
    policy = load_policy(experts_directory, device="cpu", dtype=dtype, compiled=True)
    torch._dynamo.utils.counters.clear()
    with torch._inductor.config.patch(force_disable_caches=True):
        found = of_policy(policy)
    breaks = torch._dynamo.utils.counters["graph_break"]
    assert all("packed_attention" in reason for reason in breaks), "attention on a CPU is not compiled; all else is"
    if dtype == "float32":
        assert (found.logprobs - plain.logprobs).abs().max() <= TOLERANCE
        for name, gradient in plain.gradients.items():
            assert (found.gradients[name] - gradient).norm() <= TOLERANCE * gradient.norm(), name
        return
    # A token whose scores are nearly equal may have other experts in another rounding: errors are compared as a whole.
    exact = of_policy(load_policy(experts_directory, device="cpu")).gradients
    ours, theirs = (
        sum(float((numbers.gradients[name] - value).square().sum()) for name, value in exact.items()) ** 0.5
        for numbers in (found, plain)
    )
    assert ours <= 1.5 * theirs


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("sizes", [(0, 3, 0, 70, 1), (64, 65, 0, 0), (0, 0)])
def test_the_kernel_adds_each_experts_outer_products(
    sizes: tuple[int, ...], adds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = use("kernels", monkeypatch)
    from truestep.weights.grouped_kernel import add_gradients

    generator, rows = torch.Generator().manual_seed(0), sum(sizes) + 2  # two rows that belong to no expert
    first, second = (torch.randn(rows, width, generator=generator).to(HALF) for width in (24, 40))
    ends = torch.tensor(sizes).cumsum(0).int()
    buffer = torch.randn(len(sizes), 24, 40, generator=generator)
    expected, start = buffer.double() if adds else torch.zeros(buffer.shape, dtype=torch.float64), 0
    for expert, size in enumerate(sizes):
        for row in range(start, start + size):
            expected[expert] += torch.outer(first[row].double(), second[row].double())
        start += size
    given = [each.to(device) for each in (first, second, ends, buffer)]
    add_gradients(*given, adds=adds)
    torch.testing.assert_close(given[3].double().cpu(), expected, rtol=1e-6, atol=1e-5)
