"""`verify` passes on what is right, and fails, by name, on each fault that is planted."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner
from transformers import AutoConfig

from oracles.transformer import Transformer
from selection import long_except
from tiny import KINDS, make_model
from truestep.commands.cli import main
from truestep.config.load import load_config
from truestep.errors import TruestepError
from truestep.files.whole import write_json_lines
from truestep.run.assemble.step import make_objective
from truestep.tools.verify.case import make_case
from truestep.tools.verify.custom import document_labels
from truestep.tools.verify.difference import Difference, worst_of_each_kind
from truestep.tools.verify.judge import Judge, LayoutResult, make_judge, verify
from truestep.tools.verify.layouts import Layout, layouts_for
from truestep.tools.verify.oracle.losses import LOSS_TYPES
from truestep.tools.verify.oracle.records import read_document
from truestep.tools.verify.oracle.values import label_values
from truestep.tools.verify.reference import Reference
from truestep.tools.verify.report import complaints
from verify import faults

EXAMPLES = Path(__file__).parents[2] / "examples"
# The others name models and chats of the reader's own.
EVERY_LOSS = {file.stem for file in EXAMPLES.glob("*.yaml") if not file.stem.startswith(("sft", "lora-", "full-"))}


BOUNDS = {"half precision": 1.5, "update": 1e-6, "moment": 1e-6, "learning rate": 1e-9, "first weights": 0, "frozen": 0}


@pytest.fixture
def examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "examples"


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_is_float64_to_its_last_digits(kind: str, tiny_model: Callable[[str], Path]) -> None:
    """Two float64 models that share no line: plain loops, and transformers' code with every float32 made float64."""
    ids = [3, 9, 60, 7, 7, 1, 0, 22, 31, 5, 6, 8]
    plain, theirs = Transformer(tiny_model(kind)), Reference(tiny_model(kind))
    assert torch.allclose(plain.logits(ids, 0.7), theirs.logits(ids, 0.7), rtol=0, atol=1e-12)
    assert set(plain.parameters) == set(theirs.parameters)


def test_the_oracle_shares_nothing_with_what_it_judges() -> None:
    code = (
        "import sys, truestep.tools.verify.oracle.step, truestep.tools.verify.reference;"
        "own = ('truestep', 'truestep.tools', 'truestep.tools.verify');"
        "rest = {name for name in sys.modules if name.startswith('truestep') and name not in own};"
        "rest = {name for name in rest if not name.startswith('truestep.tools.verify.')};"
        "sys.exit(str(rest) if rest else 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_there_is_an_example_of_every_loss(examples: Path) -> None:
    types = {load_config(examples / f"{name}.yaml").loss.type for name in EVERY_LOSS}
    assert types == {*LOSS_TYPES, "custom"}


def check_proof(output: Path) -> None:
    said = json.loads((output / "verify.json").read_text(encoding="utf-8"))
    assert said["passed"] and {layout["ranks"] for layout in said["layouts"]} == {1, 2, 4}
    kinds = {word for layout in said["layouts"] for word in layout["name"].replace(",", "").split() if word.isalpha()}
    assert kinds >= {"FSDP", "context", "tensor", "pipeline", "x"}
    products = {"context 2 x tensor 2", "context 2 x pipeline 2", "tensor 2 x pipeline 2"}
    products |= {f"data 2 x {kind} 2" for kind in ("context", "tensor", "pipeline")}
    alone = {f"{kind} {ranks}" for kind in ("context", "tensor", "pipeline") for ranks in (2, 4)}
    assert products | alone <= {layout["name"] for layout in said["layouts"]}
    for layout in said["layouts"]:
        for kind, found in layout["worst"].items():
            assert found["value"] <= found["bound"] <= BOUNDS.get(kind, 1e-5)
    assert (output / "verify.svg").read_text(encoding="utf-8").startswith("<svg")


@pytest.mark.long
@pytest.mark.parametrize("name", ["grpo"])
def test_an_example_passes_under_every_layout_as_a_user_types_it(name: str, examples: Path, tmp_path: Path) -> None:
    """Losses of both kinds under every layout: test_layouts. How long this takes: benchmarks/verify.py."""
    command = [sys.executable, "-m", "truestep", "verify", f"examples/{name}.yaml", "--output", "out"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "within 1e-05 of float64" in done.stdout
    check_proof(tmp_path / "out")


def test_the_command_writes_what_it_found(examples: Path, tmp_path: Path) -> None:
    """Over one rank, in this process; under every layout, as a user types it, in the test above."""
    arguments = ["verify", str(examples / "grpo.yaml"), "--output", str(tmp_path / "out"), "--ranks", "1"]
    done = CliRunner().invoke(main, [*arguments, "--documents", "6"])
    assert done.exit_code == 0, done.output
    assert "within 1e-05 of float64" in done.stdout
    said = json.loads((tmp_path / "out" / "verify.json").read_text(encoding="utf-8"))
    assert said["passed"] and len(said["layouts"]) >= 9
    assert (tmp_path / "out" / "verify.svg").read_text(encoding="utf-8").startswith("<svg")


def test_documents_of_one_sequence_that_have_names_pass(examples: Path, tmp_path: Path) -> None:
    """What is compared goes by the ids of records, also where no document of a step has several."""
    lines = (examples / "rollouts.jsonl").read_text(encoding="utf-8").splitlines()
    named = [
        json.loads(line) | {"document_id": f"document {number}", "sequences": 1} for number, line in enumerate(lines)
    ]
    write_json_lines(examples / "rollouts.jsonl", named)
    config = load_config(examples / "grpo.yaml", ["--model.dtype=float32"])
    verdicts = verify(config, tmp_path / "out", only=lambda known: known.name == "one process", documents=6)
    assert len(verdicts) == 1 and not [complaint for verdict in verdicts for complaint in complaints(verdict)]


def some_layouts(layout: Layout) -> bool:
    return layout.name in (
        "FSDP 2",
        "context 2",
        "tensor 2",
        "pipeline 2, 2 stages a rank",
    )


@pytest.mark.long
def test_frozen_weights_pass_and_a_trained_one_is_found(examples: Path, tmp_path: Path) -> None:
    """Also patterns of layers that the reduced model does not have."""
    freeze = "[model.embed_tokens.*, lm_head.*, model.layers.0.*, model.layers.17.*]"
    config = load_config(examples / "grpo.yaml", [f"--model.freeze={freeze}", "--model.dtype=float32"])
    verdicts = verify(config, tmp_path / "out", only=some_layouts, documents=6)
    assert len(verdicts) == 4 and not [complaint for verdict in verdicts for complaint in complaints(verdict)]
    plant = faults.nothing_frozen
    (found,) = verify(config, tmp_path / "out", only=lambda known: known.name == "FSDP 2", plant=plant, documents=6)
    assert any(line.startswith("gradient ") and "the reference has none" in line for line in complaints(found))


# Also targets by patterns of layers that the reduced model does not have.
ADAPTER = ["--adapter.rank=3", "--adapter.targets=[q_proj, down_proj, model.layers.17.mlp.*_proj]"]


def test_adapters_pass(examples: Path, tmp_path: Path) -> None:
    """Their gradients under every kind of layout: ranks/test_adapters.py."""
    config = load_config(examples / "grpo.yaml", [*ADAPTER, "--model.dtype=float32"])
    verdicts = verify(config, tmp_path / "out", only=lambda known: known.name == "tensor 2", documents=6)
    assert len(verdicts) == 1 and not [complaint for verdict in verdicts for complaint in complaints(verdict)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "plant", "complaint"),
    [
        ("one process", faults.adapter_without_its_scale, "log-prob "),
        ("FSDP 2", faults.base_trained_with_its_adapter, "the reference has none"),
        ("tensor 2", faults.norms_not_summed_over_tensor_ranks, "lora_A"),
    ],
)
def test_faults_of_adapters_are_found(
    layout: str, plant: Callable[[], None], complaint: str, examples: Path, tmp_path: Path
) -> None:
    config = load_config(examples / "grpo.yaml", [*ADAPTER, "--model.dtype=float32"])
    (found,) = verify(config, tmp_path / "out", only=lambda known: known.name == layout, plant=plant, documents=6)
    assert any(complaint in line for line in complaints(found))


@pytest.mark.release
def test_adapters_pass_under_every_layout(examples: Path, tmp_path: Path) -> None:
    """Half precision among them."""
    arguments = ["verify", str(examples / "gspo.yaml"), "--adapter.rank", "8", "--output", str(tmp_path / "out")]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    check_proof(tmp_path / "out")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.release) for name in sorted(EVERY_LOSS - {"grpo"})],
)
def test_every_example_passes_under_every_layout(name: str, examples: Path, tmp_path: Path) -> None:
    """Each loss, a user's own, corrections, recomputed log-probs and a reference; the test above has `grpo`.

    By the same command, in this process: its ranks are forked from a server that other tests have started.
    """
    done = CliRunner().invoke(main, ["verify", str(examples / f"{name}.yaml"), "--output", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert "within 1e-05 of float64" in done.stdout
    check_proof(tmp_path / "out")


@pytest.mark.parametrize(
    "name", [pytest.param("gspo", marks=pytest.mark.long), pytest.param("gmpo", marks=pytest.mark.release)]
)
def test_examples_pass_over_eight_ranks(name: str, examples: Path) -> None:
    config = load_config(examples / f"{name}.yaml")
    verdicts = verify(config, Path("out"), most_ranks=8, only=lambda layout: layout.ranks == 8)
    eight = [verdict for verdict in verdicts if verdict.layout.ranks == 8]
    assert len(eight) >= 3 and all(verdict.passed for verdict in eight)


@pytest.mark.parametrize("name", ["dppo", "gmpo", "grpo"])
def test_log_probs_lie_on_both_sides_of_every_bound(name: str, examples: Path, tmp_path: Path) -> None:
    """Of clips, masks and corrections alike, and none so near a bound that float32 would decide."""
    config = load_config(examples / f"{name}.yaml")
    case = make_case(config, tmp_path, 14, full=False)
    objective, reference = make_objective(config), Reference(case.model)
    sides: dict[float, set[bool]] = {}
    for record in case.records:
        document = read_document(record, 1.0)
        if not document.positions:
            continue
        with torch.no_grad():
            logprobs = torch.stack([value.logprob for value in label_values(reference, document)])
        for values, bound in objective.switches(document_labels(document, logprobs, logprobs, logprobs)):
            sides.setdefault(bound, set()).update((values > bound).tolist())
            assert float((values - bound).abs().min()) > 1e-2 * abs(bound)
    assert len(sides) >= 2 and all(side == {False, True} for side in sides.values()), sides


@pytest.mark.parametrize("name", long_except(["grpo", "gspo", "cispo"], "gspo"))
def test_ratios_lie_on_both_sides_of_both_bounds(name: str, examples: Path, tmp_path: Path) -> None:
    config = load_config(examples / f"{name}.yaml")
    case = make_case(config, tmp_path, 14, full=False)
    loss = case.options["loss"]
    low, high = 1 - loss["epsilon_low"], 1 + loss["epsilon_high"]
    ratios = []
    with torch.no_grad():
        for record in case.records:
            document = read_document(record, 1.0)
            values = label_values(Reference(case.model), document)
            assert document.old_logprobs is not None
            log_ratios = [v.logprob.item() - old for v, old in zip(values, document.old_logprobs, strict=True)]
            if name == "gspo" and log_ratios:
                log_ratios = [sum(log_ratios) / len(log_ratios)]
            ratios += [torch.tensor(value).exp().item() for value in log_ratios]
    assert any(low < ratio < 1 for ratio in ratios) and any(1 < ratio < high for ratio in ratios)
    assert any(ratio > high for ratio in ratios)
    assert low <= 0 or any(ratio < low for ratio in ratios)


# A fault of each kind of layout; the others are planted by `make test-long`.
FOUND_IN_MAKE_TEST = (
    (faults.per_rank_mean, "FSDP 2", "gradient", ""),
    (faults.mean_of_means, "smallest micro-batches", "metric", ""),
    (faults.counted_on_every_rank, "tensor 2", "loss", "loss"),
    (faults.tied_gradient_of_one_stage, "pipeline 2", "gradient", "embed_tokens"),
    (faults.labels_counted_from_each_ranks_first, "context 2", "gradient", ""),
    (faults.wrong_temperature, "one process", "log-prob", "logprobs of document"),
    (faults.prefix_gradient_counted_once, "shared prefixes", "gradient", ""),
)


_judges: dict[str, Judge] = {}  # of this module: faults of one configuration share its case and the reference's steps


@pytest.fixture(scope="module", autouse=True)
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("cases")
    _judges.clear()


@pytest.fixture
def judge(examples: Path, scratch: Path) -> Callable[..., LayoutResult]:
    """Give a function that judges one layout with a fault."""

    def result(
        layout: str, plant: Callable[[], None], name: str = "grpo", documents: int = 14, **over: Any
    ) -> LayoutResult:
        key = f"{name} {documents} {over}"
        if key not in _judges:
            given = [f"--{option.replace('__', '.')}={value}" for option, value in over.items()]
            folder = scratch / str(len(_judges))
            folder.mkdir()
            _judges[key] = make_judge(load_config(examples / f"{name}.yaml", given), folder, documents, full=False)
        made = _judges[key]
        made.plant = plant
        known = layouts_for(made.case.budget, made.case.longest, 4, kernels=False)
        (verdict,) = made.judge([one for one in known if one.name == layout])
        return verdict

    return result


@pytest.mark.parametrize(
    ("plant", "layout", "kind", "named"),
    long_except(
        [
            (faults.per_rank_mean, "FSDP 2", "gradient", ""),
            (faults.local_label_count, "FSDP 2", "loss", "loss"),
            (faults.hidden_world_division, "FSDP 2", "gradient", "layers"),
            (faults.last_micro_batch_only, "FSDP 2, breadth first 2", "gradient", ""),
            (faults.document_on_two_ranks, "FSDP 2", "metric", ""),
            (faults.untied_head, "FSDP 2", "gradient", "lm_head.weight"),
            (faults.counted_on_every_rank, "tensor 2", "loss", "loss"),
            (faults.norms_not_summed_over_tensor_ranks, "data 2 x tensor 2", "gradient", "norm"),
            (faults.mean_of_means, "smallest micro-batches", "metric", ""),
            (faults.tied_gradient_of_one_stage, "pipeline 2", "gradient", "embed_tokens"),
            (faults.extremes_of_a_stage_without_a_loss, "pipeline 2", "metric", "advantage"),
            (faults.wrong_temperature, "one process", "log-prob", "logprobs of document"),
            (faults.labels_shifted_by_one, "one process", "log-prob", "logprobs of document"),
            (faults.clip_sides_swapped, "one process", "metric", "clipped_ratio_fraction"),
            (faults.counted_on_every_rank, "context 2", "loss", "loss"),
            (faults.labels_counted_from_each_ranks_first, "context 2", "gradient", ""),
            (faults.sibling_seen, "shared prefixes", "log-prob", "logprobs of document"),
            (faults.prefix_gradient_counted_once, "shared prefixes", "gradient", ""),
            (faults.positions_begin_anew, "shared prefixes", "log-prob", "logprobs of document"),
            (faults.labels_of_a_prefix_counted_once, "shared prefixes", "count", "num_labels"),
            (faults.prefix_gradient_counted_once, "context 2, shared prefixes", "gradient", ""),
            (faults.sibling_seen, "FSDP 2, shared prefixes", "log-prob", "logprobs of document"),
        ],
        *FOUND_IN_MAKE_TEST,
    ),
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_planted_fault_is_found_and_named(
    plant: Callable[[], None], layout: str, kind: str, named: str, judge: Callable[..., LayoutResult]
) -> None:
    verdict = judge(layout, plant)
    assert verdict.failure is None, verdict.failure
    found = {difference.kind: difference for difference in verdict.wrong}
    assert kind in found, complaints(verdict)
    assert named in found[kind].name
    assert any(found[kind].name in complaint for complaint in complaints(verdict))


# The part of a document's product that a rank has is taken for the whole: by a loss, and by a correction.
@pytest.mark.parametrize("name", long_except(["gspo", "gmpo", "dppo"], "gspo"))
def test_document_sums_of_one_rank_are_found_and_named(name: str, judge: Callable[..., LayoutResult]) -> None:
    verdict = judge("context 4", faults.document_sums_of_one_rank, name=name)
    assert verdict.failure is None, verdict.failure
    found = {difference.kind: difference.value for difference in verdict.wrong}
    assert "gradient" in found, complaints(verdict)


@pytest.mark.long
@pytest.mark.parametrize(
    ("plant", "kind", "named"),
    [
        (faults.masked_labels_leave_the_denominator, "loss", "loss"),
        (faults.corrections_that_learn, "gradient", ""),
        (faults.corrections_by_the_label, "metric", "correct"),
        (faults.masked_whatever_way_they_move, "metric", "clipped_fraction"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_fault_in_a_correction_is_found_and_named(
    plant: Callable[[], None], kind: str, named: str, judge: Callable[..., LayoutResult]
) -> None:
    verdict = judge("smallest micro-batches", plant, name="dppo")
    assert verdict.failure is None, verdict.failure
    found = {difference.kind: difference for difference in verdict.wrong}
    assert kind in found, complaints(verdict)
    assert named in found[kind].name, complaints(verdict)


@pytest.mark.long
@pytest.mark.parametrize(
    ("plant", "named", "over"),
    [
        (faults.recomputed_after_the_update, "", {"loss__old_logprobs": "recompute", "schedule__updates_per_batch": 2}),
        (faults.reference_that_is_trained, "reference", {"loss__kl_reference__weight": 0.1}),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_fault_before_the_update_is_found_and_named(
    plant: Callable[[], None], named: str, over: dict[str, Any], judge: Callable[..., LayoutResult]
) -> None:
    over = over | {"optimizer__learning_rate": 0.01, "model__dtype": "float32"}
    verdict = judge("smallest micro-batches", plant, name="gmpo", **over)
    assert verdict.failure is None, verdict.failure
    found = {difference.kind: difference for difference in verdict.wrong}
    assert named in found["metric"].name, complaints(verdict)


@pytest.mark.long
def test_references_pass_under_layouts_of_every_kind(examples: Path) -> None:
    """With the trainer's own old log-probs, two updates on the same documents, and another model as the reference,
    whose weights lie on the host between its uses."""
    over = {
        "loss.old_logprobs": "recompute",
        "schedule.updates_per_batch": 2,
        "loss.kl_reference.weight": 0.1,
        "loss.kl_reference.path": "examples/model",
        "loss.kl_reference.offload": "true",
        "optimizer.learning_rate": 0.01,
        "model.dtype": "float32",
    }
    config = load_config(examples / "dppo.yaml", [f"--{name}={value}" for name, value in over.items()])
    names = {"one process", "head: 1 row a chunk", "FSDP 2", "context 2", "tensor 2", "pipeline 2"}
    verdicts = verify(config, Path("out"), only=lambda layout: layout.name in names)
    assert len(verdicts) == len(names) and all(v.passed for v in verdicts), [complaints(v) for v in verdicts]


EXPLORATION = {
    "clip_cov": {"loss.clip_cov": "{share: 0.1, low: 0.1, high: 9.0}", "loss.entropy_target": "{entropy: 6.0}"},
    "kl_cov": {
        "loss.kl_cov": "{share: 0.2, weight: 0.5}",
        "loss.entropy_bonus": "0.01",
        "loss.entropy_normalize_by": "labels",
    },
}


@pytest.mark.parametrize(
    ("name", "option"), long_except([("grpo", "clip_cov"), ("gspo", "kl_cov")], ("grpo", "clip_cov"))
)
def test_labels_held_back_and_a_steered_entropy_pass_under_layouts_of_every_kind(
    name: str, option: str, examples: Path
) -> None:
    over = EXPLORATION[option] | {"model.dtype": "float32", "optimizer.learning_rate": "0.01"}
    config = load_config(examples / f"{name}.yaml", [f"--{key}={value}" for key, value in over.items()])
    names = ("FSDP 2", "context 2", "pipeline 2, 2 stages a rank")
    verdicts = verify(config, Path("out"), only=lambda layout: layout.name in names, documents=8)
    assert len(verdicts) == 3 and all(v.passed for v in verdicts), [complaints(v) for v in verdicts]


@pytest.mark.parametrize(
    ("plant", "option", "named"),
    long_except(
        [
            (faults.labels_chosen_in_each_micro_batch, "clip_cov", "clip_cov_fraction"),
            (faults.labels_chosen_in_each_micro_batch, "kl_cov", "kl_cov_fraction"),
            (faults.steered_by_one_micro_batch, "clip_cov", "entropy_bonus"),
        ],
        (faults.labels_chosen_in_each_micro_batch, "kl_cov", "kl_cov_fraction"),
        (faults.steered_by_one_micro_batch, "clip_cov", "entropy_bonus"),
    ),
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_fault_in_exploration_is_found_and_named(
    plant: Callable[[], None], option: str, named: str, judge: Callable[..., LayoutResult]
) -> None:
    over = {key.replace(".", "__"): value for key, value in EXPLORATION[option].items()}
    verdict = judge("smallest micro-batches", plant, model__dtype="float32", **over)
    assert verdict.failure is None, verdict.failure
    assert any(named in complaint for complaint in complaints(verdict)), complaints(verdict)


@pytest.mark.long
def test_ranks_that_hang_are_a_failure_with_a_reason(judge: Callable[..., LayoutResult]) -> None:
    # Two documents a step over four ranks.
    verdict = judge("FSDP 4, ragged ranks", faults.ragged_ranks_hang, documents=4, schedule__stall_timeout=3)
    assert not verdict.passed
    # Each waits for the others, and the message says where: half of them in the model, half behind it.
    assert "in packed_hidden" in (verdict.failure or "") and "in accumulate" in (verdict.failure or ""), verdict.failure


def test_layouts_that_a_models_heads_do_not_permit_are_left_out(tmp_path: Path) -> None:
    from small_runs import write_rollouts

    write_rollouts(tmp_path / "rollouts.jsonl", 4)
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 48}
    options = {
        "model": {"path": str(make_model(tmp_path / "model", "llama", **heads)), "dtype": "float32"},
        "data": {"path": str(tmp_path / "rollouts.jsonl"), "advantages": "none", "tokens_per_microbatch": 64},
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(options), encoding="utf-8")
    config = load_config(tmp_path / "c.yaml")
    verdicts = verify(
        config, tmp_path / "out", full=True, only=lambda layout: layout.name in ("context 2", "context 4")
    )
    assert [(verdict.layout.name, verdict.passed) for verdict in verdicts] == [("context 2", True)]


def test_layouts_that_a_model_does_not_permit_are_left_out(tmp_path: Path) -> None:
    """One whose layers come without a plan of how to cut them."""
    settings = {"vocab_size": 61, "n_embd": 32, "n_layer": 1, "n_head": 4}
    AutoConfig.for_model("gpt2", **settings).save_pretrained(tmp_path / "model")
    options = {"model": {"path": str(tmp_path / "model"), "dtype": "float32"}, "loss": {"type": "cross_entropy"}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(options), encoding="utf-8")
    config = load_config(tmp_path / "c.yaml")
    assert verify(config, tmp_path / "out", documents=2, only=lambda layout: "tensor" in layout.name) == []


def test_tensor_ranks_are_left_out_where_layers_are_compiled(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    options = {"model": {"path": str(tiny_model("llama")), "dtype": "float32", "compile": True}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(options | {"loss": {"type": "cross_entropy"}}), encoding="utf-8")
    config = load_config(tmp_path / "c.yaml")
    assert verify(config, tmp_path / "out", documents=2, only=lambda layout: "tensor" in layout.name) == []


def test_pipelines_that_a_model_does_not_permit_are_left_out(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """Two layers make two stages."""
    from small_runs import write_rollouts

    write_rollouts(tmp_path / "rollouts.jsonl", 4)
    options = {
        "model": {"path": str(tiny_model("llama")), "dtype": "float32"},
        "data": {"path": str(tmp_path / "rollouts.jsonl"), "advantages": "none", "tokens_per_microbatch": 64},
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(options), encoding="utf-8")
    config = load_config(tmp_path / "c.yaml")
    verdicts = verify(config, tmp_path / "out", full=True, only=lambda layout: layout.name.startswith("pipeline"))
    permitted = ["pipeline 2", "pipeline 2, shared prefixes"]
    assert [(verdict.layout.name, verdict.passed) for verdict in verdicts] == [(name, True) for name in permitted]


def test_the_whole_model_and_its_own_rollouts(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    from small_runs import write_rollouts

    write_rollouts(tmp_path / "rollouts.jsonl", 12)
    options = {
        "model": {"path": str(tiny_model("qwen3_tied")), "dtype": "float32"},
        "data": {"path": str(tmp_path / "rollouts.jsonl"), "advantages": "none", "tokens_per_microbatch": 64},
        "schedule": {"updates_per_batch": 2},
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(options), encoding="utf-8")
    names = {"one process", "HSDP 2 x 2"}
    verdicts = verify(
        load_config(tmp_path / "c.yaml"), tmp_path / "out", full=True, only=lambda layout: layout.name in names
    )
    assert len(verdicts) == 2 and all(verdict.passed for verdict in verdicts), [complaints(v) for v in verdicts]


def test_the_command_fails_with_exit_code_1(tmp_path: Path) -> None:
    """A config whose model cannot be made: one message."""
    (tmp_path / "c.yaml").write_text("model: {path: nowhere}\ndata: {path: nothing.jsonl}\n", encoding="utf-8")
    done = CliRunner().invoke(main, ["verify", str(tmp_path / "c.yaml"), "--output", str(tmp_path / "out")])
    assert done.exit_code == 1
    assert "nowhere" in done.stderr and isinstance(done.exception, SystemExit)


def test_under_torchrun_it_is_refused(examples: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(TruestepError, match="starts its own ranks"):
        verify(load_config(examples / "grpo.yaml"), Path("out"))


def test_a_difference_that_is_not_a_number_is_the_worst() -> None:
    """Later and smaller differences of the same kind do not hide it."""
    values = {"gradient": (1e-9, float("nan"), 1e-7), "loss": (1e-9, 1e-7, 1e-8)}
    worst = worst_of_each_kind(
        Difference(step, kind, str(step), value) for kind in values for step, value in enumerate(values[kind])
    )
    assert {kind: difference.step for kind, difference in worst.items()} == {"gradient": 1, "loss": 1}
    assert [difference.kind for difference in LayoutResult(Layout("one process"), worst).wrong] == ["gradient"]


def test_layouts_that_need_more_ranks_than_there_are_are_left_out() -> None:
    assert {layout.ranks for layout in layouts_for(64, 20, 2, kernels=False)} == {1, 2}
