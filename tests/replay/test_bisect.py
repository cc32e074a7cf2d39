"""The documents and labels that made a metric jump are found, in few replays; and what is said is so."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from click.testing import CliRunner
from rich.cells import cell_len

from doors.toy_metrics import Largest, Spread
from ranks.cases import on_ranks
from report.test_rollouts import payload
from small_runs import (
    change_plans,
    file_config,
    kept_rows,
    quiet_trainer,
    read_lines,
    sampled_config,
    sort_prompts,
    tell,
    word_model,
    write_lines,
)
from truestep.commands.cli import main
from truestep.config.schema import Config
from truestep.metrics.types import Max, Mean, Min
from truestep.rollouts.check import check_files
from truestep.run.again import ReplayError
from truestep.step.compute.runner import StepRunner
from truestep.step.update.blame import only
from truestep.step.update.gradient_clipping import gradient_norm
from truestep.tools.replay.bisect import Bisection, _Finder, bisect
from truestep.tools.replay.found import _files, _line_of, wrapped
from truestep.tools.replay.gradient_parts import Direction, GradientParts
from truestep.tools.replay.jumps import Jump, find_jump, jump_at
from truestep.tools.replay.outliers import Typical
from truestep.tools.replay.parts import (
    Scale,
    document_metrics,
    far_together,
    label_metric,
    labels_of,
    left_out,
    merged,
    places_of,
)
from truestep.tools.replay.search import Part, search, search_extreme
from truestep.types import StepPlan

Model = Callable[[str], Path]
Record = dict[str, Any]
STEPS, DOCUMENTS, JUMP = 8, 40, 6  # steps of a run, documents of each, and the step with the planted documents


def records(count: int, seed: int = 1) -> list[Record]:
    """Documents of a run where nothing is wrong: old log-probs near those of a model that knows nothing."""
    draw = random.Random(seed)
    made = []
    for number in range(count):
        labels = draw.randrange(6, 12)
        made.append(
            {
                "id": f"d{number}",
                "group_id": f"g{number // 4}",
                "input_ids": [draw.randrange(14) for _ in range(2 + labels)],
                "prompt_length": 2,
                "logprobs": [-2.6 + draw.uniform(-0.1, 0.1) for _ in range(labels)],
                "advantage": draw.uniform(-1.0, 1.0),
                "reward": 1.0,
            }
        )
    return made


@pytest.fixture
def run(tiny_model: Model, tmp_path: Path) -> Callable[..., Path]:
    """A run whose step JUMP has planted documents: `plant` changes the records of that step."""

    def make(plant: Callable[[list[Record]], None] = lambda step: None, steps: int = STEPS, **sections: Any) -> Path:
        count = sections.get("schedule", {}).get("docs_per_step", DOCUMENTS)
        lines = records(steps * count)
        plant(lines[min(JUMP - 1, steps - 1) * count :][:count])  # it changes the records themselves
        config = run_config(tiny_model("llama"), write_lines(tmp_path / "r.jsonl", lines), tmp_path / "run", **sections)
        quiet_trainer(config).run()
        return tmp_path / "run"

    return make


def run_config(model: Path, rollouts: Path, run: Path, **sections: Any) -> Config:
    base: dict[str, Any] = {
        "data": {"tokens_per_microbatch": 80},
        "schedule": {"docs_per_step": DOCUMENTS},
        "optimizer": {"learning_rate": 1e-6},
        "logging": {"rollouts": {"documents": "all"}},
        "checkpoint": {"every": 2, "keep": 9},
        "deterministic": True,
    }
    for part, options in sections.items():
        base[part] = {**base[part], **options} if isinstance(base.get(part), dict) else options
    return file_config(model, rollouts, run, **base)


def a_huge_advantage(step: list[Record]) -> None:
    step[17]["advantage"] = 300.0


def a_wrong_old_logprob(step: list[Record]) -> None:
    step[23]["logprobs"][4] = -14.0


def repeated_tokens(step: list[Record]) -> None:
    step[8] |= {"input_ids": [3, 4] + [7] * 60, "logprobs": [-3.5] * 60, "advantage": 4.0}


FOUND = {
    "a huge advantage, by the norm": (a_huge_advantage, "grad_norm", "17"),
    "a huge advantage, by the loss": (a_huge_advantage, "loss", "17"),
    "a huge advantage, by a maximum": (a_huge_advantage, "max_advantage", "17"),
    "a wrong old log-prob, by a mean": (a_wrong_old_logprob, "kl_new_old", "23"),
    "a wrong old log-prob, by a sum": (a_wrong_old_logprob, "ratio_new_old_squared_sum", "23"),
    "a wrong old log-prob, by a function of sums": (a_wrong_old_logprob, "effective_sample_share", "23"),
    "repeated tokens, by the norm": (repeated_tokens, "grad_norm", "8"),
}


@pytest.mark.parametrize("case", FOUND)
def test_a_planted_document_is_found(run: Callable[..., Path], case: str) -> None:
    plant, metric, number = FOUND[case]
    path = run(plant)
    found = bisect(path, metric)
    bad = f"d{(JUMP - 1) * DOCUMENTS + int(number)}"
    assert found.step == JUMP and found.jumped and [one.id for one in found.documents] == [bad], found.text
    assert found.replay is not None and found.replay.exact, "what is looked for changes nothing of the step"
    assert found.replays <= 2 + 6 and found.computed < 3.3
    assert found.without is not None
    jump = jump_at(metric, {line["step"]: line[metric] for line in read_lines(path / "metrics.jsonl")}, JUMP)
    assert jump.usual is not None
    assert abs(found.without - jump.usual) < 0.2 * abs(jump.value - jump.usual), "without it the step is as usual"
    assert all(len(line) <= 80 for line in found.lines)
    assert f"document {bad}, group g" in said(found) and f"r.jsonl:{int(bad[1:]) + 1}" in "".join(found.text.split())


def test_the_label_with_the_wrong_logprob_is_found(run: Callable[..., Path], tmp_path: Path) -> None:
    path = run(a_wrong_old_logprob)
    (document,) = bisect(path, "kl_new_old", output=tmp_path / "found").documents
    (label,) = [label for label in document.labels if label.share is not None]
    assert label.place == 2 + 4 and label.old_logprob == -14.0 and label.share == pytest.approx(1.0, abs=0.01)
    assert label.log_ratio == max(label.log_ratio or 0.0 for label in document.labels)
    (line,) = read_lines(tmp_path / "found" / "found.jsonl")
    assert line["id"] == document.id and len(line["policy_logprobs"]) == len(line["logprobs"])
    assert line["metadata"]["bisect"]["label_shares"] == {"6": label.share}
    assert check_files([str(tmp_path / "found" / "found.jsonl")]).documents == 1
    (row,) = kept_rows(tmp_path / "found")
    assert row["id"] == document.id and row["largest_log_ratio"] == pytest.approx(label.log_ratio)


def test_two_documents_are_found_by_the_norm_and_the_loss(run: Callable[..., Path]) -> None:
    def plant(step: list[Record]) -> None:
        step[3]["advantage"], step[31]["advantage"] = 200.0, 150.0

    path = run(plant)
    bad = {f"d{(JUMP - 1) * DOCUMENTS + number}" for number in (3, 31)}
    for metric in ("grad_norm", "loss", "max_advantage"):
        found = bisect(path, metric)
        assert {one.id for one in found.documents} == bad and found.replays <= 14, found.text


def said(found: Bisection) -> str:
    return " ".join(found.text.split())


def test_documents_that_make_it_together_are_listed(run: Callable[..., Path]) -> None:
    """Twelve of 160, of which none makes a tenth."""

    def plant(step: list[Record]) -> None:
        for number in range(8, 20):
            step[number] |= {"advantage": -25.0, "group_id": "bad"}
            step[number] |= {name: step[8][name] for name in ("input_ids", "logprobs")}

    path = run(plant, steps=4, schedule={"docs_per_step": 160})
    bad = {f"d{3 * 160 + number}" for number in range(8, 20)}
    for metric in ("loss", "grad_norm"):
        found = bisect(path, metric)
        assert found.step == 4 and not found.documents and found.replays <= 40, found.text
        assert len(set(found.together) & bad) >= 6 and len(found.together) <= 16, found.text
        assert "no document alone makes it" in said(found)
        assert metric == "grad_norm" or "all of group bad" in said(found)


def test_where_nothing_is_wrong_nothing_stands_out(run: Callable[..., Path]) -> None:
    path = run()
    for metric in ("grad_norm", "loss", "kl_new_old", "entropy"):
        found = bisect(path, metric)
        assert found.step is None and not found.documents and "stands out at none of 8 steps" in said(found)
    for metric in ("grad_norm", "kl_new_old"):
        looked = bisect(path, metric, JUMP)
        assert not looked.jumped and not looked.documents and "nothing stands out" in said(looked), looked.text
        assert "does not stand out at step 6" in said(looked)


def test_a_step_that_is_large_as_a_whole_is_no_documents_fault(run: Callable[..., Path]) -> None:
    def plant(step: list[Record]) -> None:
        for record in step:
            record["advantage"] *= 30.0

    found = bisect(run(plant), "grad_norm")
    assert found.jumped and not found.documents and not found.together, found.text
    assert "the whole step does" in said(found) and found.replays <= 40


def test_a_metric_of_a_users_own_type_is_looked_into(run: Callable[..., Path]) -> None:
    """Its documents' parts are what leaving each out takes away."""

    def plant(step: list[Record]) -> None:
        step[23]["logprobs"][4] = -40.0

    path = run(
        plant,
        logging={"custom_metrics": ["doors.toy_metrics:unsteady"], "rollouts": {"documents": "all"}},
    )
    found = bisect(path, "ratio_spread")
    assert found.step == JUMP and found.replay is not None and found.replay.exact, found.text
    assert [one.id for one in found.documents] == [f"d{(JUMP - 1) * DOCUMENTS + 23}"], found.text
    usual = read_lines(path / "metrics.jsonl")[JUMP - 2]["ratio_spread"]
    assert found.replays <= 3 and found.without == pytest.approx(usual, rel=0.1), found.text


@pytest.mark.parametrize("bad", [(17, 23), (3, 8, 17, 21, 23, 30)], ids=len)
def test_documents_that_hide_each_other_in_a_users_own_metric(run: Callable[..., Path], bad: Sequence[int]) -> None:
    """A maximum that several have: without one of them it stays what it is. Few are found, and of many nothing false is
    said."""

    def plant(step: list[Record]) -> None:
        for number in bad:
            step[number]["logprobs"][4] = -40.0

    path = run(plant, logging={"custom_metrics": ["doors.toy_metrics:farthest"], "rollouts": {"documents": "all"}})
    found = bisect(path, "farthest_label")
    names = {f"d{(JUMP - 1) * DOCUMENTS + number}" for number in bad}
    assert found.step == JUMP and not found.documents and "the whole step" not in said(found), found.text
    if len(bad) == 2:
        usual = read_lines(path / "metrics.jsonl")[JUMP - 2]["farthest_label"]
        assert set(found.together) == names and "no document alone makes it; 2 of 40 together do" in said(found)
        assert found.without == pytest.approx(usual, abs=2.0)
    else:
        assert not found.together and "Which of them make it is not known" in said(found), found.text


def test_the_few_without_which_an_own_metric_is_usual() -> None:
    """Against leaving out each set of the farthest: of values that rose, and of values that fell."""
    for sign in (1.0, -1.0):
        values = {n: Largest(float(n % 7)) if sign > 0 else Mean(-float(n % 7), 1.0) for n in range(30)}
        values |= {n: replace(values[n], **({"largest": 90.0} if sign > 0 else {"total": -900.0})) for n in (4, 11)}
        value = merged(values.values()).value()
        assert value is not None and abs(value) > 60, value
        assert sorted(far_together(values, sign * 3.0, value)) == [4, 11]
        many = {**values, **dict.fromkeys(range(20), values[4])}
        assert far_together(many, sign * 3.0, merged(many.values()).value() or 0.0) == []


def test_what_is_left_out_of_an_own_type_is_the_whole_less_the_rest() -> None:
    draws = np.random.default_rng(1).normal(size=(7, 5))
    known = {number * 3: Spread(5.0, float(row.sum()), float((row**2).sum())) for number, row in enumerate(draws)}
    found = left_out(known)
    for number in range(7):
        rest = np.delete(draws, number, 0)
        assert found[number * 3].value() == pytest.approx(draws.std() - rest.std(), abs=1e-12)
    assert left_out({4: known[0]})[4].value() == pytest.approx(draws[0].std(), abs=1e-12)


def test_errors_say_what_to_do(run: Callable[..., Path], tmp_path: Path) -> None:
    path = run(a_huge_advantage)
    for metric, said in (
        ("gradnorm", r"has no metric gradnorm; did you mean grad_norm[?] It has\n  advantage, "),
        ("step_time", "no document contributes to step_time"),
        ("learning_rate", "no document contributes to learning_rate"),
    ):
        with pytest.raises(ReplayError, match=said):
            bisect(path, metric)
    with pytest.raises(ReplayError, match="zero_advantage_groups is not made of single documents"):
        bisect(path, "zero_advantage_groups", JUMP)
    with pytest.raises(ReplayError, match="has no grad_norm of step 99: it has steps 1 to 8"):
        bisect(path, "grad_norm", 99)
    for block in (path / "records").iterdir():
        block.unlink()
    with pytest.raises(ReplayError, match=r"were not kept.*logging.rollouts.documents: all keeps them"):
        bisect(path, "grad_norm")
    shown = CliRunner().invoke(main, ["bisect", str(path), "--metric", "nothing"])
    assert shown.exit_code == 1 and "has no metric nothing" in shown.output


def test_the_command(run: Callable[..., Path], tmp_path: Path) -> None:
    path = run(a_huge_advantage)
    asked = ["bisect", str(path), "--metric", "grad_norm", "--output", str(tmp_path / "found")]
    shown = CliRunner().invoke(main, asked)
    assert shown.exit_code == 0 and f"document d{(JUMP - 1) * DOCUMENTS + 17}, group g" in shown.output, shown.output
    assert "1 of 40 documents makes it; without it grad_norm is " in shown.output
    other = CliRunner().invoke(main, [*asked[:4], "--data.tokens_per_microbatch", "30"])
    assert other.exit_code == 0 and f"document d{(JUMP - 1) * DOCUMENTS + 17}, group g" in other.output


def test_a_sampled_document_is_shown_with_its_prompt_and_texts(tmp_path: Path) -> None:
    word_model(tmp_path / "model")
    prompts = [{"prompt": prompt["prompt"], "answer": prompt["answer"]} for prompt in sort_prompts(9)]
    sections: dict[str, Any] = {"checkpoint": {"every": 2, "keep": 9}, "logging": {"rollouts": {"documents": "all"}}}
    config = sampled_config(
        tmp_path / "model",
        write_lines(tmp_path / "p.jsonl", prompts),
        tmp_path / "run",
        **{**sections, "schedule": {"steps": 6}, "optimizer": {"learning_rate": 1e-6}, "deterministic": True},
    )

    def plant(plan: StepPlan) -> StepPlan:
        if plan.documents_seen != 4 * 8:
            return plan
        changed = replace(plan.documents[5], advantages=plan.documents[5].loss_mask * np.float32(500.0))
        return replace(plan, documents=(*plan.documents[:5], changed, *plan.documents[6:]))

    trainer = quiet_trainer(config)
    change_plans(trainer, plant)
    trainer.run()
    found = bisect(tmp_path / "run", "grad_norm", output=tmp_path / "found")
    (document,) = found.documents
    shown = CliRunner().invoke(main, ["report", str(tmp_path / "found")])
    assert shown.exit_code == 0, "the report shows it"
    assert payload((tmp_path / "found" / "report.html").read_text(), "texts")["rows"][0][1] == document.id
    assert found.step == 5 and document.document.advantages is not None
    assert document.document.advantages.max() == 500.0
    number = int(str(document.document.metadata["prompt_id"]).rpartition(":")[2])
    assert f"{tmp_path / 'p.jsonl'}:{number}" in "".join(found.text.split())
    assert f"prompt: {prompts[number - 1]['prompt']}" in said(found) and "completion: " in said(found)


# ---- what the parts are, against the whole


def looked_into(
    tiny_model: Model, tmp_path: Path, look: Callable[[StepRunner, StepPlan, float], None], **sections: Any
) -> None:
    """Call `look` with the first step of a run, when its gradient is there."""
    rollouts = write_lines(tmp_path / "r.jsonl", records(14))
    trainer = quiet_trainer(run_config(tiny_model("llama"), rollouts, tmp_path / "run", **sections))
    called = []

    def gradient(plan: StepPlan, computed: object, norm: float) -> None:
        look(trainer.runner, plan, norm)
        called.append(norm)

    tell(trainer, gradient=gradient)
    trainer.run()
    assert called


LOSSES: dict[str, dict[str, Any]] = {
    "labels": {"loss": {"type": "grpo", "entropy_bonus": 0.01, "entropy_normalize_by": "document_means"}},
    "documents": {"loss": {"type": "gspo", "z_loss": 0.1}},
}


@pytest.mark.parametrize("kind", LOSSES)
def test_parts_of_the_norm_add_up_and_are_products_with_the_gradient(
    tiny_model: Model, tmp_path: Path, kind: str
) -> None:
    """Of documents and of labels, against gradients as vectors in float64."""

    def look(runner: StepRunner, plan: StepPlan, norm: float) -> None:
        weights = runner.policy.weights

        def vector() -> np.ndarray:
            return np.concatenate([gradient.double().numpy().ravel() for gradient in weights.gradients.values()])

        whole = vector()
        parts = GradientParts(runner, plan, Direction(weights, norm))
        found = []
        for number in range(len(plan.documents)):
            found.append(parts.of_documents([number]))
            assert found[-1] == pytest.approx(whole @ vector() / norm, abs=1e-6 * norm)
        assert sum(found) == pytest.approx(norm, rel=1e-5)
        places = plan.documents[2].loss_mask.nonzero()[0].tolist()
        labels = [parts.of_labels(2, [place]) for place in places]
        assert sum(labels) == pytest.approx(found[2], abs=1e-5 * norm) and len(set(labels)) == len(labels)
        assert parts.of_labels(2, places) == pytest.approx(found[2], abs=1e-6 * norm)
        rest = [number for number in parts.order() if number not in (0, 3)]
        assert sorted([*rest, 0, 3]) == list(range(len(plan.documents)))
        assert parts.norm_without([0, 3]) == pytest.approx(_norm_of(runner, plan, rest), rel=1e-6)
        parts.direction.restore()
        assert np.array_equal(vector(), whole)

    looked_into(tiny_model, tmp_path, look, **LOSSES[kind])


def _norm_of(runner: StepRunner, plan: StepPlan, some: Sequence[int]) -> float:
    runner.accumulate(only(plan, some))
    return gradient_norm(runner.policy.weights)


@pytest.mark.parametrize("kind", LOSSES)
def test_parts_of_metrics_are_what_leaving_out_takes_away(tiny_model: Model, tmp_path: Path, kind: str) -> None:
    """Sums and means of the documents are the step's own, and a step without a document is short of its part."""

    def look(runner: StepRunner, plan: StepPlan, norm: float) -> None:
        whole = runner.accumulate(plan, backward=False).metrics
        rest = runner.accumulate(only(plan, [number for number in range(14) if number != 5]), backward=False).metrics
        labels = labels_of(runner, only(plan, [5]))[0]
        for name in (
            "loss",
            "new_logprobs",
            "kl_new_old",
            "entropy",
            "clipped_ratio_fraction",
            "effective_sample_size",
        ):
            known = document_metrics(runner, plan, name)
            assert known is not None and sorted(known) == list(range(14))
            scale = Scale(merged(known.values()), whole[name].value() or 0.0, None)
            assert scale.whole.value() == pytest.approx(whole[name].value(), rel=1e-6)
            kept: Any = rest[name]
            if name not in ("loss", "effective_sample_size"):  # a mean counts all documents of the step
                kept = replace(kept, count=cast(Mean, whole[name]).count)
            assert scale.without(known[5]) == pytest.approx(kept.value(), rel=1e-6), name
            places = np.concatenate([places_of(one).numpy() for one in labels])
            own = label_metric(labels, places, name, runner, plan)
            assert own is not None and scale.amount(own) == pytest.approx(scale.amount(known[5]), rel=1e-6, abs=1e-12)
            if name != "effective_sample_size":  # no sum
                alone = [label_metric(labels, np.array([place]), name, runner, plan) for place in places]
                amounts = [scale.amount(one) for one in alone if one is not None]
                assert sum(amounts) == pytest.approx(scale.amount(known[5]), rel=1e-6, abs=1e-12), name

    looked_into(tiny_model, tmp_path, look, **LOSSES[kind])


def _total(values: Sequence[float], some: Sequence[int]) -> float:
    return sum(values[number] for number in some)


def test_the_search_takes_log2_measurements_for_one_among_many() -> None:
    draw = random.Random(3)
    for planted in (1, 2, 5):
        bad = set(draw.sample(range(100_000), planted))
        values = [draw.uniform(-1e-6, 2e-6) for _ in range(100_000)]
        for number in bad:
            values[number] = 1.0 / planted
        measure = partial(_total, values)
        found = search(range(100_000), sum(values), measure, 0.1, most=100)
        assert {one.members[0] for one in found.found} == bad
        assert found.measured <= 17 * planted and found.members <= 100_000 * planted
    even = search(range(100_000), 1.0, lambda some: len(some) / 100_000, 0.1)
    assert not even.found and even.measured <= 16


def test_where_the_search_ends_what_is_left_is_known() -> None:
    values = [0.0] * 100_000
    for number in range(7, 100_000, 20_011):
        values[number] = 0.2
    found = search(range(100_000), 1.0, partial(_total, values), 0.1, most=38)
    assert len(found.found) == 2 and found.measured == 38
    left = [number for one in found.left for number in one.members]
    assert sum(one.part for one in found.left) == pytest.approx(0.6) and _total(values, left) == pytest.approx(0.6)
    assert all(one.part < 0.1 for one in found.others)


def test_an_extreme_is_found_in_few_measurements() -> None:
    values = [0.0] * 1000
    values[313] = values[700] = 9.0
    asked: list[int] = []

    def largest(some: Sequence[int]) -> float:
        asked.append(len(some))
        return max(values[number] for number in some)

    assert sorted(one.members[0] for one in search_extreme(range(1000), largest, 5.0, most=160)) == [313, 700]
    assert len(asked) <= 45
    assert not search_extreme(range(1000), lambda some: 9.0, 5.0, most=160)


def test_a_long_document_is_no_outlier_where_all_have_doubled() -> None:
    weights = dict.fromkeys(range(9), 10.0) | {9: 200.0}
    draw = random.Random(2)
    parts = [Part(2.0 * weight * draw.uniform(0.9, 1.1), [number]) for number, weight in weights.items()]
    typical = Typical.of(parts, weights)
    assert not any(typical.far(one) for one in parts) and not typical.few_together(parts, 0.5 * 290.0)
    parts[3] = Part(300.0, [3])
    typical = Typical.of(parts, weights)
    assert [one.members for one in parts if typical.far(one)] == [[3]]
    assert typical.few_together(parts, 0.5 * 300.0) == [3], "one of ten is few"


def test_a_document_of_eight_stands_out() -> None:
    parts = [Part(0.5, [0]), *(Part(0.5 / 7, [number]) for number in range(1, 8))]
    typical = Typical.of(parts, dict.fromkeys(range(8), 1.0))
    assert [one.members for one in parts if typical.far(one)] == [[0]]


def test_small_but_clear_jumps_are_jumps() -> None:
    for usual, value in ((1.0, 1.35), (2.0, 1.25)):
        values = {step: usual * (1 + 0.001 * (step % 3)) for step in range(1, 30)} | {20: value}
        found = find_jump("m", values)
        assert found is not None and found.step == 20
        assert found.unusual(usual) < 0.01 and found.unusual(value) == 1.0


def test_a_maximum_that_falls_is_made_by_no_document() -> None:
    assert Scale(Max(1.0), 1.0, 3.0).falls_short and Scale(Min(3.0), 3.0, 1.0).falls_short
    assert not Scale(Max(3.0), 3.0, 1.0).falls_short and not Scale(Mean(1.0, 1.0), 1.0, 3.0).falls_short


def test_lines_are_of_a_terminals_width() -> None:
    lines = wrapped("算" * 100 + " a-b/" + "c-d" * 40 + " word", "  ")
    assert all(cell_len(line) <= 80 for line in lines)
    assert "".join("".join(lines).split()) == "算" * 100 + "a-b/" + "c-d" * 40 + "word"


def changed_line(run: Path, step: int, **values: float) -> None:
    lines = read_lines(run / "metrics.jsonl")
    lines[step - 1] |= values
    write_lines(run / "metrics.jsonl", lines)


def test_a_jump_that_the_replay_does_not_have_is_no_documents_fault(run: Callable[..., Path]) -> None:
    path = run()
    usual = read_lines(path / "metrics.jsonl")[JUMP - 1]["grad_norm"]
    changed_line(path, JUMP, grad_norm=40 * usual)
    found = bisect(path, "grad_norm")
    assert found.step == JUMP and not found.documents and not found.together and found.replays == 1, found.text
    assert "the jump is not in the replay" in said(found) and "is not what it was" in said(found)
    shown = CliRunner().invoke(main, ["bisect", str(path), "--metric", "grad_norm"])
    assert shown.exit_code == 1 and "it is not the documents" in " ".join(shown.output.split())


def test_a_norm_that_fell_or_is_zero_is_not_looked_into(run: Callable[..., Path], tmp_path: Path) -> None:
    def plant(step: list[Record]) -> None:
        for record in step:
            record["advantage"] = 0.0

    path = run(plant)
    found = bisect(path, "grad_norm", JUMP, tmp_path / "found")
    assert not found.documents and "grad_norm is 0, so no document contributes to it" in said(found), found.text
    none: Any = None
    fell = _Finder(Jump("grad_norm", 5, 0.5, [1.0, 1.01, 0.99, 1.0] * 3), none, none, False, 0, value=0.5)
    assert "grad_norm fell" in (fell._pointless() or "")
    with pytest.raises(ReplayError, match="zero_advantage_groups is not made"):
        bisect(path, "zero_advantage_groups", JUMP, tmp_path / "other")
    assert not list((tmp_path / "other").iterdir()), "a refused metric leaves nothing"


def test_the_first_of_steps_in_a_row_is_the_jump() -> None:
    draw = random.Random(4)
    values = {step: 1.0 + draw.uniform(-0.1, 0.1) for step in range(1, 60)}
    assert find_jump("m", values) is None
    values |= {40: 3.0, 41: 9.0, 42: 9.1}
    found = find_jump("m", values)
    assert found is not None and found.step == 40 and found.usual == pytest.approx(1.0, abs=0.1)
    drifting = {step: 100.0 - step for step in range(1, 90)}
    assert find_jump("m", drifting) is None
    first = find_jump("m", {1: 50.0, **{step: 1.0 + 0.01 * (step % 3) for step in range(2, 9)}})
    assert first is not None and first.step == 1


def short(number: int) -> Record:
    return {
        "id": f"d{number}",
        "input_ids": [number % 13, (5 * number + 1) % 14],
        "prompt_length": 1,
        "logprobs": [-2.6],
        "advantage": 0.5 - number % 2,
    }


def found_among(tiny_model: Model, tmp_path: Path, count: int) -> None:
    lines = [short(number) for number in range(count)]
    lines[count // 3]["advantage"] = 10.0 * count
    lines[count // 2]["logprobs"] = [-20.0]
    assert lines[count // 2]["advantage"] > 0, "its ratio is clipped, so the loss does not see it"
    sections = {"data": {"tokens_per_microbatch": 16384}, "schedule": {"docs_per_step": count}}
    config = run_config(tiny_model("llama"), write_lines(tmp_path / "r.jsonl", lines), tmp_path / "run", **sections)
    quiet_trainer(config).run()
    for metric, bad in (("grad_norm", 3), ("loss", 3), ("kl_new_old", 2), ("ratio_new_old", 2)):
        begun = time.process_time()
        found = bisect(tmp_path / "run", metric, 1)
        assert [one.id for one in found.documents] == [f"d{count // bad}"], found.text
        assert found.replays <= 40 and found.computed <= 3.1
        took = time.process_time() - begun
        print(f"{metric}: {found.replays} replays, {found.computed:.1f} steps in all, {took:.0f} s of one core")
        assert found.replay is not None and found.replay.exact


def test_one_among_thousands(tiny_model: Model, tmp_path: Path) -> None:
    found_among(tiny_model, tmp_path, 1_000)


@pytest.mark.release
@pytest.mark.timeout(3600)
def test_one_among_a_hundred_thousand(tiny_model: Model, tmp_path: Path) -> None:
    found_among(tiny_model, tmp_path, 100_000)


def find_on_ranks(run: str, bad: str, metrics: Sequence[str]) -> None:
    for metric in metrics:
        found = bisect(Path(run), metric)
        assert [one.id for one in found.documents] == [bad] and found.replay is not None and found.replay.lawful


@pytest.mark.long
def test_two_ranks(run: Callable[..., Path]) -> None:
    """A run of one process, looked into by two: weights and documents are divided."""
    path = run(a_huge_advantage)
    on_ranks(2, find_on_ranks, str(path), f"d{(JUMP - 1) * DOCUMENTS + 17}", ("grad_norm", "loss"))


def test_a_prompt_is_found_in_a_file_of_a_mixture(tmp_path: Path) -> None:
    """Of sources by name, one of which is a dataset whose rows are no lines."""
    file = write_lines(tmp_path / "b.jsonl", [{"id": f"p{number}", "prompt": "1"} for number in range(3)])
    prompts = {"a": {"dataset": "owner/set"}, "b": str(file)}
    config = sampled_config(tmp_path / "model", file, tmp_path / "run", sampler={"prompts": prompts})
    assert _files(config, prompts=True) == [file] and _files(config, prompts=False) == []
    assert _line_of(file, ("p1",)) == 2
