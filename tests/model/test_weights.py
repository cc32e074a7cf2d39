"""Float32 weights and gradients beside a model that computes in bfloat16."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from documents import make_documents, pack_all, same_bits
from tiny import make_model
from truestep.head.logits import HeadSettings
from truestep.model.fast.embedding import add_rows
from truestep.model.fast.fused_products import as_one
from truestep.model.loading.load import load_policy
from truestep.model.mixers import attention
from truestep.model.policy import ModelFacts, Policy
from truestep.model.save import save_policy
from truestep.weights.whole import WholeWeights

Made = Callable[[str], Path]
MICRO_BATCHES = [make_documents([5, 9, 2], 0), make_documents([20], 1), make_documents([1, 7], 2)]


def backward(policy: Policy, number: int) -> None:
    hidden = policy.hidden(pack_all(MICRO_BATCHES[number]).tokens)
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(number))
    (hidden.float() * weights).sum().backward()


@pytest.mark.parametrize("kind", ["llama", "gemma2", "qwen3_tied"])
def test_masters_are_the_file_and_the_model_is_rounded_once(kind: str, tiny_model: Made) -> None:
    file = load_file(tiny_model(kind) / "model.safetensors")
    policy = load_policy(tiny_model(kind), dtype="bfloat16", device="cpu")
    computed = dict(policy.model.named_parameters())
    assert set(policy.weights.master) == set(file) == set(computed)
    for name, tensor in file.items():
        assert not torch.equal(tensor, tensor.bfloat16().float()), "a float32 file, or the test says nothing"
        assert same_bits(policy.weights.master[name], tensor), name
        assert same_bits(computed[name], tensor.bfloat16()), name


def test_a_bfloat16_file_is_read_exactly(tmp_path: Path) -> None:
    file = load_file(make_model(tmp_path, "llama", dtype="bfloat16") / "model.safetensors")
    for dtype in ("float32", "bfloat16"):
        policy = load_policy(tmp_path, dtype=dtype, device="cpu")
        for name, tensor in file.items():
            assert same_bits(policy.weights.master[name], tensor.float()), name


def test_a_float32_model_has_no_second_copy(tiny_model: Made) -> None:
    policy = load_policy(tiny_model("llama"), device="cpu")
    for name, parameter in policy.model.named_parameters():
        assert policy.weights.master[name] is parameter
        assert policy.weights.gradients[name] is parameter.grad


@pytest.mark.parametrize("kind", ["llama", "qwen3_tied"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_micro_batches_add_up_in_float32(kind: str, dtype: str, tiny_model: Made) -> None:
    policy = load_policy(tiny_model(kind), dtype=dtype, device="cpu")
    parts = []
    for number in range(len(MICRO_BATCHES)):
        policy.weights.zero_gradients()
        backward(policy, number)
        parts.append({name: gradient.clone() for name, gradient in policy.weights.gradients.items()})
    policy.weights.zero_gradients()
    for number in range(len(MICRO_BATCHES)):
        backward(policy, number)
    rounded = False
    for name, gradient in policy.weights.gradients.items():
        assert gradient.dtype == torch.float32
        assert same_bits(gradient, parts[0][name] + parts[1][name] + parts[2][name]), name
        rounded |= not torch.equal(gradient, gradient.bfloat16().float())
    assert rounded, "sums that bfloat16 could hold would prove nothing"
    if dtype == "bfloat16":
        assert all(parameter.grad is None for parameter in policy.model.parameters())


def test_buffers_are_cleared_in_place(tiny_model: Made) -> None:
    policy = load_policy(tiny_model("llama"), dtype="bfloat16", device="cpu")
    before = policy.weights.gradients
    backward(policy, 0)
    assert any(gradient.norm() > 0 for gradient in before.values())
    policy.weights.zero_gradients()
    for name, gradient in policy.weights.gradients.items():
        assert gradient is before[name]
        assert not gradient.any()
        assert policy.weights.gradient_of(dict(policy.model.named_parameters())[name]) is gradient


def test_a_buffer_has_memory_from_its_first_gradient_on(tiny_model: Made) -> None:
    policy = load_policy(tiny_model("llama"), dtype="bfloat16", device="cpu")
    buffers = policy.weights.gradients
    policy.weights.zero_gradients()
    assert all(buffer.untyped_storage().nbytes() for buffer in buffers.values()), "unless something goes to the host"
    policy.weights.moved_beside(lambda: None)
    policy.weights.zero_gradients()
    assert not any(buffer.untyped_storage().nbytes() for buffer in buffers.values())
    backward(policy, 0)
    late = {name for name, buffer in buffers.items() if not buffer.untyped_storage().nbytes()}
    assert late == {"lm_head.weight"}, "what no pass came through has none"
    assert not policy.weights.gradients["lm_head.weight"].any(), "and who asks for it finds zeros"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_nobody_has_any_more_are_freed(dtype: str, tiny_model: Made) -> None:
    """A circle through a parameter's hooks would keep them for ever."""
    policy = load_policy(tiny_model("llama"), dtype=dtype, device="cpu")
    backward(policy, 0)
    weights, gradient = weakref.ref(policy.weights), weakref.ref(next(iter(policy.weights.gradients.values())))
    del policy
    gc.collect()
    assert weights() is None and gradient() is None


def test_publish_rounds_once(tiny_model: Made) -> None:
    """Updates too small for bfloat16 add up in the masters and come through when they have grown."""
    policy = load_policy(tiny_model("llama"), dtype="bfloat16", device="cpu")
    name = "model.layers.0.mlp.up_proj.weight"
    computed = dict(policy.model.named_parameters())[name]
    before, start = computed.detach().clone(), policy.weights.master[name].detach().clone()
    update = start.abs() * 2**-14  # bfloat16 keeps 8 bits
    for _ in range(256):
        with torch.no_grad():
            policy.weights.master[name] += update
        policy.weights.publish()
        policy.weights.publish()
    master = policy.weights.master[name].detach()
    expected = start.double() + 256 * update.double()
    torch.testing.assert_close(master.double(), expected, rtol=1e-4, atol=0)
    assert same_bits(computed, master.bfloat16())
    assert (computed != before).float().mean() > 0.9
    assert policy.hidden(pack_all(MICRO_BATCHES[0]).tokens).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("frozen", ["lm_head.weight", "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"])
def test_a_frozen_parameter(frozen: str, dtype: torch.dtype, tiny_model: Made, tmp_path: Path) -> None:
    """It computes like the others, has no gradient and no master, and is saved as it computes."""
    path = tiny_model("llama")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=attention.NAME)
    parameter = dict(model.named_parameters())[frozen]
    parameter.requires_grad_(False)
    policy = Policy(model, path, HeadSettings(), WholeWeights(model, dtype), ModelFacts.of(model, torch.device("cpu")))
    assert frozen not in policy.weights.master
    assert policy.weights.gradient_of(parameter) is None
    assert parameter.dtype == dtype
    for number in range(len(MICRO_BATCHES)):
        backward(policy, number)
    assert parameter.grad is None
    others = {name: g for name, g in policy.weights.gradients.items() if name not in (frozen, "lm_head.weight")}
    assert all(gradient.norm() > 0 for gradient in others.values())
    policy.weights.publish()
    save_policy(policy, tmp_path / "saved")
    saved, before = load_file(tmp_path / "saved/model.safetensors"), load_file(path / "model.safetensors")
    assert all(
        same_bits(saved[name], tensor.to(dtype).float() if name == frozen else tensor)
        for name, tensor in before.items()
    )


@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_a_repeated_token_keeps_its_gradient_in_bfloat16(kind: str, tiny_model: Made) -> None:
    """A CPU would add up an embedding's gradient in bfloat16, and lose most of a token that a batch repeats."""
    directory = tiny_model(kind)
    documents = [replace(document, input_ids=document.input_ids * 0 + 3) for document in make_documents([9] * 80)]

    def gradient(dtype: str, together: bool) -> torch.Tensor:
        policy = load_policy(directory, dtype=dtype, device="cpu")
        for batch in (
            [pack_all(documents).tokens] if together else [pack_all([document]).tokens for document in documents]
        ):
            policy.hidden(batch).sum().backward()
        return policy.weights.gradients["model.embed_tokens.weight"][3].clone()

    exact = gradient("float32", together=True)
    alone, packed = gradient("bfloat16", together=False), gradient("bfloat16", together=True)
    assert (packed - exact).norm() <= 1.5 * (alone - exact).norm() + 1e-2 * exact.norm()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_padding_tokens_row_has_a_gradient_where_the_token_is_real(dtype: str, tiny_model: Made) -> None:
    policy = load_policy(tiny_model("llama"), dtype=dtype, device="cpu")
    padding = policy.model.config.pad_token_id
    documents = [replace(document, input_ids=document.input_ids * 0 + padding) for document in make_documents([5])]
    policy.hidden(pack_all(documents).tokens).sum().backward()
    assert policy.weights.gradients["model.embed_tokens.weight"][padding].norm() > 0


class Multiple(torch.nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 3


class WithPlaces(torch.nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + input[..., None]


class OtherTable(torch.nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.weight[input % 2] if len(self.weight) == 9 else super().forward(input)


class WithoutOne(torch.nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input.masked_fill(input == 20, 0))


@pytest.mark.parametrize(
    ("kind", "adds"), [(Multiple, True), (WithPlaces, False), (OtherTable, False), (WithoutOne, False)]
)
def test_a_kind_of_embedding_that_looks_at_rows_alone_adds_them(kind: type[torch.nn.Embedding], adds: bool) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = kind(30 if kind is WithoutOne else 9, 4)

        def get_input_embeddings(self) -> torch.nn.Module:
            return self.embedding

    torch.manual_seed(1)
    model, ids = Model(), torch.tensor([[8, 1, 1, 4]])
    weights = WholeWeights(model, torch.bfloat16)
    before = model.embedding(ids)
    before.backward(gradient := torch.randn(1, 4, 4).bfloat16())
    expected = weights.gradients["embedding.weight"].clone()
    weights.zero_gradients()
    added: list[torch.Tensor] = []
    honest = weights.add_rows
    weights.add_rows = lambda *given: added.append(given[1]) or honest(*given)  # type: ignore[assignment, func-returns-value]
    assert add_rows(model, weights, weights.rounded) is adds
    after = model.embedding(ids)
    assert torch.equal(before, after)
    after.backward(gradient)
    assert len(added) == adds
    torch.testing.assert_close(weights.gradients["embedding.weight"], expected, rtol=1e-2, atol=1e-2)
    with torch.no_grad():
        assert torch.equal(model.embedding(ids), before)
    assert list(model.state_dict()) == ["embedding.weight"]


def test_collected_gradients_outlive_the_step(tiny_model: Made) -> None:
    """The memory of a gradient may be lent when the next step begins."""
    policy = load_policy(tiny_model("llama"), dtype="bfloat16", device="cpu")
    policy.weights.moved_beside(lambda: None)
    backward(policy, 0)
    collected = policy.weights.collect_gradients()
    wanted = {name: gradient.clone() for name, gradient in policy.weights.gradients.items()}
    policy.weights.zero_gradients()
    assert all(same_bits(collected[name], gradient) for name, gradient in wanted.items())


def test_a_step_begins_with_nothing_of_the_last_one(tiny_model: Made) -> None:
    """Nobody writes zeros: the first gradient of a step takes the place of what was there, and what gets none is 0."""
    policy = load_policy(tiny_model("llama"), dtype="bfloat16", device="cpu")

    def gradients(number: int | None) -> dict[str, torch.Tensor]:
        policy.weights.zero_gradients()
        if number is not None:
            backward(policy, number)
        return {name: gradient.clone() for name, gradient in policy.weights.gradients.items()}

    first = gradients(0)
    assert all(gradient.norm() > 0 for name, gradient in first.items() if name != "lm_head.weight")
    gradients(1)
    again = gradients(0)
    assert all(torch.equal(gradient, again[name]) for name, gradient in first.items())
    assert not any(gradient.any() for gradient in gradients(None).values())


def test_what_a_group_leaves_behind_keeps_its_own_memory_alone() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 3, bias=False) for _ in range(3)))
    weights = WholeWeights(model, torch.bfloat16)
    first, second, third = model.parameters()
    values = [parameter.detach().clone() for parameter in model.parameters()]
    weights.lay_together([[first, second, third]])
    assert first.untyped_storage().nbytes() == 3 * first.nbytes
    weights.lay_together([[third, first]])
    assert second.untyped_storage().nbytes() == second.nbytes
    assert third.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), values, strict=True))


def test_groups_stay_together_wherever_memory_is_used_again() -> None:
    """What a group left may be where a later one comes to lie."""
    model = torch.nn.ModuleList(torch.nn.Linear(8, 8, bias=False) for _ in range(60))
    weights = WholeWeights(model, torch.bfloat16)
    parameters = list(model.parameters())
    values = [parameter.detach().clone() for parameter in parameters]
    for size in (3, 2, 5, 2, 3):
        groups = [parameters[first : first + size] for first in range(0, 60, size)]
        weights.lay_together(groups)
        assert all(as_one(group) is not None for group in groups)
        assert all(torch.equal(*pair) for pair in zip(parameters, values, strict=True))
        assert sum({p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in parameters}.values()) == sum(
            parameter.nbytes for parameter in parameters
        )


def test_rows_add_their_gradients_in_float32() -> None:
    """Against float64, where one row comes often; a row of nobody keeps 0."""
    model = torch.nn.Embedding(5, 3)
    weights = WholeWeights(model, torch.bfloat16)
    ids, given = torch.tensor([1, 3, 1, 1, 0, 3] * 50), torch.randn(300, 3).bfloat16()
    weights.zero_gradients()
    weights.add_rows(model.weight, ids[:100], given[:100])
    weights.add_rows(model.weight, ids[100:], given[100:])
    expected = torch.zeros(5, 3, dtype=torch.float64)
    for row, gradient in zip(ids, given, strict=True):
        expected[row] += gradient.double()
    torch.testing.assert_close(weights.gradients["weight"].double(), expected, rtol=1e-5, atol=1e-5)
    assert not weights.gradients["weight"][[2, 4]].any()
