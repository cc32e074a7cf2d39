"""What only a GPU can show: the fused packed attention, the float32 head at half precision's price, mixed devices."""

from __future__ import annotations

import gc
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from oracles.step import oracle_logprobs, oracle_step
from scoring import check_against_oracle, run_score, write_records
from small_runs import file_config, merged, quiet_trainer, write_rollouts
from step.test_conveyor import Moves
from step.test_score_oracle import LOSSES, OPTIONS, config_for, records_for
from tiny import make_model
from truestep.config.schema import Config
from truestep.gpu.pinned_counter import Window, count_true
from truestep.head.chunked import HeadRows, forward_backward
from truestep.head.logits import HeadSettings, row_statistics, scaled_logits
from truestep.losses.label_losses import Grpo
from truestep.losses.objective import Denominator, Objective
from truestep.model.loading.load import load_policy
from truestep.model.mixers import attention, flash
from truestep.rollouts.packing import pack, pack_tokens
from truestep.rollouts.record import Checks, Needs, parse_record
from truestep.run.checkpoint.staging import Staging
from truestep.step.compute.runner import StepRunner
from truestep.step.plan.plan import StepRule, plan_exactly
from truestep.step.update.optimizers.conveyor import Streams
from truestep.types import Coefficients
from truestep.weights.tensor_parts import TensorPart
from truestep.weights.whole import WholeWeights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

KINDS = ("llama", "qwen3", "qwen3_tied", "gemma2", "mistral")


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("kind", KINDS)
def test_float32_on_the_gpu_equals_the_oracle(
    kind: str, loss: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    model = tiny_model(kind)
    records = records_for(model, loss)
    file = write_records(tmp_path / "rollouts.jsonl", records)
    for chunk, budget in ((7, 50), ("auto", 1000)):
        config = config_for(model, file, {"type": loss, "entropy_bonus": 0.1, **OPTIONS[loss]})
        config["model"] |= {"device": "cuda", "head": {"logits_chunk_size": chunk}}
        config["data"]["tokens_per_microbatch"] = budget
        check_against_oracle(run_score(config, tmp_path / "out"), oracle_step(model, records, config))


@pytest.mark.parametrize("kind", ["llama", "qwen3_tied", "mistral", "gemma2"])
def test_bfloat16_is_as_near_float64_packed_as_alone(
    kind: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """In bfloat16 a layout's error is at most 1.5 × that of documents run one by one: docs/contract.md, section 2."""
    model = tiny_model(kind)
    records = records_for(model, "grpo", max_length=60)
    file = write_records(tmp_path / "rollouts.jsonl", records)
    exact = [value for document in oracle_logprobs(model, records) for value in document]
    errors = []
    for budget in (60, 100_000):
        config = config_for(model, file, {"type": "grpo"}, tokens_per_microbatch=budget)
        config["model"] |= {"device": "cuda", "dtype": "bfloat16", "head": {"fp32_lm_head": True}}
        scored = run_score(config, tmp_path / str(budget))
        found = [value for document in scored.documents for value in document["logprobs"]]
        errors.append((torch.tensor(found) - torch.tensor(exact)).norm() / torch.tensor(exact).norm())
    assert errors[0] < 0.05, "bfloat16 itself"
    assert errors[1] <= 1.5 * errors[0]


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_the_fused_attention_is_used_and_keeps_documents_apart(
    kind: str, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    honest = attention._varlen
    monkeypatch.setattr(attention, "_varlen", lambda *values, **named: (calls.append(1), honest(*values, **named))[1])
    policy = load_policy(tiny_model(kind), dtype="bfloat16", device="cuda")
    needs = Needs(logprobs=False, advantages=False, advantage_rule="none")
    generator = torch.Generator().manual_seed(0)
    documents = [
        parse_record(
            {"input_ids": torch.randint(61, (length,), generator=generator).tolist(), "prompt_length": 1},
            str(length),
            Checks(needs, vocabulary_size=61),
        )
        for length in (3, 40, 1, 17)
    ]
    together = policy.hidden(pack(documents).tokens)
    alone = [policy.hidden(pack([document]).tokens) for document in documents]
    assert calls
    relative = (together - torch.cat(alone)).float().norm() / torch.cat(alone).float().norm()
    assert relative < 1e-2


def test_the_float32_head_costs_no_precision_on_the_gpu() -> None:
    generator = torch.Generator(device="cuda").manual_seed(0)
    hidden = torch.randn(512, 1024, device="cuda", generator=generator).bfloat16()
    weight = (torch.randn(32_003, 1024, device="cuda", generator=generator) * 2 / 1024**0.5).bfloat16()
    labels = torch.randint(32_003, (512,), device="cuda", generator=generator)
    ones = torch.ones(512, device="cuda")
    exact = row_statistics(scaled_logits(hidden.double(), weight.double(), ones, HeadSettings()), labels).logprobs
    error = {}
    for fp32 in (True, False):
        found = row_statistics(scaled_logits(hidden, weight, ones, HeadSettings(fp32=fp32)), labels).logprobs
        error[fp32] = float((found - exact).abs().max())
    assert error[True] <= 1e-4
    assert error[False] > 1e-3


def test_more_logits_than_an_int32_can_count() -> None:
    """One chunk of 2.5e9 of them, against chunks that are far from it."""
    rows, vocabulary = 16_384, 151_936
    assert rows * vocabulary > 2**31
    generator = torch.Generator(device="cuda").manual_seed(0)
    hidden = torch.randn(rows, 64, device="cuda", generator=generator).bfloat16()
    weight = (torch.randn(vocabulary, 64, device="cuda", generator=generator) * 2 / 8).bfloat16()
    labels = torch.randint(vocabulary, (rows,), device="cuda", generator=generator)
    advantages = torch.randn(rows, device="cuda", generator=generator) / rows
    found = {}
    for chunk in (rows, 1024):
        head = HeadRows(
            hidden, weight, labels, torch.ones(rows, device="cuda"), HeadSettings(fp32=True, chunk_size=chunk)
        )
        buffer = torch.zeros_like(weight, dtype=torch.float32)
        result = forward_backward(
            head, lambda at, _: Coefficients(advantages[at], None, advantages[at]), weight_gradient=buffer
        )
        found[chunk] = (result.statistics, result.hidden_gradient, buffer)
    (one, one_hidden, one_weight), (many, many_hidden, many_weight) = found.values()
    for name in ("logprobs", "entropy", "logsumexp"):
        assert float((getattr(one, name) - getattr(many, name)).abs().max()) <= 1e-5
    # Tensor cores sum in another order for another number of rows; a wrong offset would be off by all of it.
    for mine, other in ((one_hidden, many_hidden), (one_weight, many_weight)):
        assert float((mine - other).norm() / other.norm()) <= 1e-3


FLASH = pytest.mark.skipif(flash.version() is None, reason="flash-attn-4 is not installed")
SHAPES = [
    flash.Heads(16, 8, 128, 128, 128**-0.5),
    flash.Heads(8, 8, 64, 64, 0.125, window=100),
    flash.Heads(16, 8, 256, 256, 1 / 16, softcap=50.0),
    flash.Heads(16, 8, 256, 256, 1 / 16, window=100, softcap=50.0),
    flash.Heads(14, 2, 64, 64, 0.125),
]


@FLASH
@pytest.mark.parametrize("heads", SHAPES)
def test_flash_attention_is_as_near_float32_as_torchs(heads: flash.Heads) -> None:
    assert flash.problem((heads,), torch.bfloat16, torch.device("cuda")) is None


@FLASH
@pytest.mark.parametrize("heads", SHAPES)
def test_flash_attention_of_a_document_does_not_depend_on_its_neighbours(heads: flash.Heads) -> None:
    """Bit for bit in `deterministic` mode, values and gradients."""
    lengths = (300, 1, 129, 700, 64)
    generator = torch.Generator(device="cuda").manual_seed(0)

    def random(count: int, size: int) -> torch.Tensor:
        return torch.randn(sum(lengths), count, size, device="cuda", generator=generator).bfloat16()

    given = random(heads.queries, heads.size), random(heads.keys, heads.size), random(heads.keys, heads.value_size)
    gradient = random(heads.queries, heads.value_size)

    def run(rows: slice, documents: tuple[int, ...]) -> list[torch.Tensor]:
        inputs = [tensor[rows].clone().requires_grad_() for tensor in given]
        bounds = torch.tensor((0, *documents), device="cuda").cumsum(0).int()
        output = flash.attend(*inputs, bounds, max(documents), heads.scale, heads.window, heads.softcap)
        output.backward(gradient[rows])
        return [output.detach(), *(tensor.grad for tensor in inputs if tensor.grad is not None)]

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        packed, first = run(slice(None), lengths), 0
        for length in lengths:
            rows = slice(first, first := first + length)
            for together, alone in zip(packed, run(rows, (length,)), strict=True):
                assert torch.equal(together[rows], alone)
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("how", [False, "elementwise"])
def test_products_of_compiled_layers_add_gradients_in_float32(
    how: bool | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the sum, in float64, of what the products were given; into memory that is there or given anew."""
    model = make_model(tmp_path / "model", "qwen3", hidden_size=64, head_dim=64)
    torch._dynamo.reset()
    policy = load_policy(model, dtype="bfloat16", device="cuda", compiled=True, activation_checkpointing=how)
    weights = policy.weights
    assert isinstance(weights, WholeWeights)
    names = {parameter: name for name, parameter in policy.model.named_parameters()}
    honest, sums = WholeWeights.add_product, dict[str, torch.Tensor]()

    def add(keeper: WholeWeights, parameter: torch.nn.Parameter, gradient: torch.Tensor, rows: torch.Tensor) -> None:
        product = gradient.double().T @ rows.double()
        sums[names[parameter]] = sums.get(names[parameter], 0) + product
        honest(keeper, parameter, gradient, rows)

    monkeypatch.setattr(WholeWeights, "add_product", add)
    for lends in (False, True):
        if lends:
            weights.moved_beside(lambda: None)
        weights.zero_gradients()
        sums.clear()
        for length in (90, 300, 17):
            tokens = pack_tokens([torch.arange(length) % 61])
            policy.hidden(tokens).float().square().sum().backward()
        gradients = weights.gradients
        assert len(sums) == 7 * policy.model.config.num_hidden_layers
        for name, total in sums.items():
            assert float((gradients[name] - total).norm() / total.norm()) < 1e-6, name


@FLASH
@pytest.mark.parametrize(
    ("kind", "how"),
    [("llama", False), ("gemma2", False), ("mistral", False), ("qwen3", "elementwise"), ("gemma2", "elementwise")],
)
def test_a_step_with_flash_attention_compiles_once(kind: str, how: bool | str, tmp_path: Path) -> None:
    """One graph for each kind of layer, whatever the packing, and nothing that breaks it."""
    model = make_model(tmp_path / "model", kind, head_dim=64)  # of heads of 8 the kernels make wrong gradients
    torch._dynamo.reset()
    counted = torch._dynamo.utils.counters
    counted.clear()
    policy = load_policy(model, dtype="bfloat16", device="cuda", compiled=True, activation_checkpointing=how)
    assert policy.attends.name == attention.FLASH, policy.attends
    plain = load_policy(model, dtype="bfloat16", device="cuda", attending="torch")
    graphs = []
    for lengths in ((9, 4), (3, 8, 5, 12), (30,), (7, 7, 7, 7, 7), (50, 2)):
        tokens = pack_tokens([torch.arange(length) % 61 for length in lengths])
        found = policy.hidden(tokens)
        torch.testing.assert_close(found, plain.hidden(tokens), rtol=0.1, atol=0.1)
        found.float().square().sum().backward()
        graphs.append(counted["stats"]["unique_graphs"])
    assert graphs[-1] == graphs[1], graphs
    assert not counted["graph_break"], dict(counted["graph_break"])


@FLASH
def test_shapes_that_the_kernels_get_wrong_are_found() -> None:
    """flash-attn-4 4.0.0b36 makes wrong gradients of queries for heads of 8. Where that is mended, this fails."""
    said = flash.problem((flash.Heads(4, 2, 8, 8, 8**-0.5),), torch.bfloat16, torch.device("cuda"))
    assert said is not None and said.startswith("its dq are off by")


def test_the_host_waits_only_where_it_must(tmp_path: Path, tiny_model: Callable[[str], Path]) -> None:
    """Between passes: for how many rows the head's backward pass has, one number each chunk. Nothing else is waited for
    before the last pass has been launched."""
    model = tiny_model("llama")
    records = records_for(model, "grpo")
    policy = load_policy(model, dtype="bfloat16", device="cuda")
    needs = Needs(logprobs=True, advantages=True, advantage_rule="none")
    documents = [parse_record(record, str(i), Checks(needs, vocabulary_size=61)) for i, record in enumerate(records)]
    plan = plan_exactly(documents, StepRule(len(documents), False, 1, 1, 60), 0)
    assert len(plan.micro_batches) > 2
    runner = StepRunner(policy, Objective(Grpo(0.2, 0.2), Denominator("labels")))
    runner.accumulate(plan)
    waits: list[list[str]] = []

    def note(*_: object, **__: object) -> None:
        waits.append([f"{Path(frame.filename).name}:{frame.name}" for frame in traceback.extract_stack()])

    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = note
            runner.accumulate(plan)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    between = [stack for stack in waits if any(place.endswith("passes.py:run") for place in stack)]
    assert between, "the mode sees what waits"
    assert all("chunked.py:_chunk" in stack for stack in between), [stack[-6:] for stack in between]


def test_a_window_is_written_past_the_copies_to_the_host() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    window, large, flags = Window(device), torch.ones(2**30, device="cuda"), torch.arange(1000, device="cuda") % 3 == 0
    host, stream, others = torch.empty(2**30, pin_memory=True), torch.cuda.Stream(), ~flags
    window.inside.fill_(1)
    assert count_true(flags) == 334
    torch.cuda.synchronize()  # all kernels have been loaded
    with torch.cuda.stream(stream):
        host.copy_(large, non_blocking=True)  # some 80 ms
        copied = torch.cuda.current_stream().record_event()
    window.inside.fill_(7)
    assert count_true(others) == 666
    assert window.number == 7 and not copied.query()
    torch.cuda.synchronize()
    assert bool((host == 1).all())


def test_what_a_step_reads_does_not_wait_behind_a_save() -> None:
    """A small copy to the host comes through between pieces of large ones."""
    parts = [
        TensorPart(f"{n}", (2**28 + n,), (0,), torch.full((2**28 + n,), float(n), device="cuda")) for n in range(1, 5)
    ]
    staging, number = Staging(), torch.ones(1, device="cuda")
    staged = staging.stage(parts)  # the memory is made
    torch.cuda.synchronize()
    thread = threading.Thread(target=staged.copy)
    thread.start()
    reads = 0
    while thread.is_alive():
        number.item()
        reads += 1
        time.sleep(0.001)
    staged.before_update()
    assert all(bool((copy.values == float(copy.key)).all()) for copy in staged.parts)
    assert reads > 10, "a read that waits for all of them is the only one"


def test_states_on_both_devices_are_saved_together() -> None:
    """AdamW counts its updates on the host. A state that is not finite is named on either device."""
    parts = [
        TensorPart("weight", (3,), (0,), torch.arange(3.0, device="cuda")),
        TensorPart("step", (), (), torch.tensor(7.0)),
        TensorPart("ruined", (1,), (0,), torch.tensor([float("nan")], device="cuda")),
        TensorPart("ruined here", (), (), torch.tensor(float("inf"))),
    ]
    staged = Staging().stage(parts)
    staged.copy()
    assert sorted(staged.not_finite) == ["ruined", "ruined here"]
    assert staged.parts[0].values.tolist() == [0, 1, 2] and staged.parts[1].values.item() == 7


def _late(honest: Callable[..., Any], stream: str) -> Callable[..., Any]:
    """Have a lane's stream be busy for a millisecond before it copies a load."""

    def copy(lanes: Streams, *loads: Any) -> Any:
        with torch.cuda.stream(getattr(lanes, stream)):
            torch.cuda._sleep(1_500_000)
        return honest(lanes, *loads)

    return copy


@pytest.mark.parametrize("offload", ["states", "all"])
def test_what_is_on_the_host_moves_beside_the_passes_and_takes_no_more_memory(
    offload: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers are bit for bit those without. Some loads come before an update, and some go back after it: copies are
    made later than a device of this speed makes so small ones."""
    write_rollouts(tmp_path / "rollouts.jsonl", 40)
    many = {"num_hidden_layers": 12, "layer_types": ["full_attention"] * 12}  # room for one is left free
    model = make_model(tmp_path / "model", "qwen3_tied", **many)
    monkeypatch.setattr("truestep.step.update.optimizers.by_weight._NUMBERS", 2000)
    moves = Moves(monkeypatch)
    for way, stream in (("fetch", "_coming"), ("send", "_going")):
        monkeypatch.setattr(Streams, way, _late(getattr(Streams, way), stream))
    weights, peaks = [], []
    for home in ("none", offload):
        config = file_config(
            model, tmp_path / "rollouts.jsonl", tmp_path / home,
            optimizer={"offload": home, "weight_decay": 0.1}, schedule={"steps": 6}, checkpoint={"every": 3},
        )  # fmt: skip
        on_gpu = merged(config.model_dump(), {"model": {"dtype": "bfloat16", "device": "cuda"}})
        config = Config.model_validate(on_gpu)
        trainer = quiet_trainer(config)
        torch.cuda.reset_peak_memory_stats()
        trainer.run()
        peaks.append(torch.cuda.max_memory_allocated())
        weights.append({name: master.detach().cpu() for name, master in trainer.policy.weights.master.items()})
        del trainer
        gc.collect()  # its memory is not the next one's
    assert all(torch.equal(weights[1][name], value) for name, value in weights[0].items())
    assert max(moves.ahead) > 0 and max(moves.going) > 2, (moves.ahead, moves.going)
    assert peaks[1] <= peaks[0], peaks
