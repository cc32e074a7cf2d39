"""Loops of one's own: they are `train` bit for bit, and depend neither on calls nor on ranks."""

from __future__ import annotations

import ast
import asyncio
import io
import json
import math
import re
import shutil
import time
import types
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from checkpoints import latest, read_weights
from documents import same_bits
from plain_rewards import digit_reward
from ranks.cases import on_ranks
from small_runs import file_config, read_lines, sampled_config, sort_prompts, word_model, write_lines, write_rollouts
from tiny import expert_model, make_model
from truestep import Callback, Rollout, Run, Session, TruestepError, dump_config
from truestep.commands.session import losses
from truestep.commands.session import session as session_module
from truestep.commands.session.errors import SessionError
from truestep.commands.session.samples import SampleError
from truestep.config.schema import Config
from truestep.run.train import train
from truestep.step.compute.runner import StepRunner
from truestep.step.learner import Learner
from truestep.types import StepTotals

GRPO = {"loss": {"type": "grpo", "normalize_by": "labels"}}
KINDS: dict[str, dict[str, Any]] = {
    "labels": {"loss": {"type": "grpo", "normalize_by": "labels", "entropy_bonus": 0.1, "z_loss": 0.01}},
    "means": {"loss": {"type": "gspo", "normalize_by": "document_means", "gradient_divisor": "deepspeed"}},
}


def options(tmp_path: Path, **sections: Any) -> tuple[Config, list[dict[str, Any]]]:
    model = tmp_path / "model"
    if not model.exists():
        make_model(model, "llama")
    records = write_rollouts(tmp_path / "rollouts.jsonl", 15)
    return file_config(model, tmp_path / "rollouts.jsonl", tmp_path / "run", **sections), records


def weights_of(session: Session, folder: Path) -> dict[str, torch.Tensor]:
    return read_weights(session.save(folder))


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(same_bits(value, other[name]) for name, value in one.items())


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], start: dict[str, torch.Tensor]) -> float:
    """The distance of two models' weights, as a share of how far they have moved."""
    moved = sum(float((one[name] - start[name]).double().square().sum()) for name in one) ** 0.5
    return sum(float((one[name] - other[name]).double().square().sum()) for name in one) ** 0.5 / moved


class Order(Callback):
    """The prompts of a run's groups, in their order."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def on_rollouts(self, run: Run, rollouts: Sequence[Rollout]) -> None:
        self.names += [str(rollout.metadata["prompt_id"]) for rollout in rollouts[::4]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_over_records_is_train_bit_for_bit(kind: str, tmp_path: Path) -> None:
    config, records = options(tmp_path, **KINDS[kind])
    train(config, Console(file=io.StringIO()))
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    with Session(config) as session:
        for number in range(3):
            some = records[5 * number : 5 * number + 5]
            session.forward_backward(some, totals=session.totals(some))
            made = session.step()
            for name in ("loss", "grad_norm", "learning_rate", "num_labels", "documents_seen"):
                expected = lines[number][name]
                found = session.documents_seen if name == "documents_seen" else made[name]
                assert found == expected, name
        assert same(weights_of(session, tmp_path / "own"), read_weights(latest(tmp_path / "run")))


def test_a_grpo_of_twenty_lines_is_train_bit_for_bit(tmp_path: Path) -> None:
    prompts = sort_prompts(64)
    model = word_model(tmp_path / "model")
    config = sampled_config(
        model, write_lines(tmp_path / "prompts.jsonl", prompts), tmp_path / "run", deterministic=True
    )
    order = Order()
    train(config, Console(file=io.StringIO()), callbacks=[order])
    asked = {one["id"]: one for one in prompts}

    with Session(config) as session:
        for step in range(3):
            tasks = [asked[name] for name in order.names[2 * step : 2 * step + 2]]
            records = []
            for task, samples in zip(tasks, session.sample([task["prompt"] for task in tasks], count=4), strict=True):
                for one in samples:
                    reward = digit_reward(task["prompt"], one.text, answer=task["answer"])
                    records.append(one.record(reward=reward, group_id=f"{step} {task['id']}"))
            session.forward_backward(records, totals=session.totals(records))
            session.step()
        assert same(weights_of(session, tmp_path / "own"), read_weights(latest(tmp_path / "run")))


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_does_not_depend_on_its_calls(kind: str, tmp_path: Path) -> None:
    config, records = options(tmp_path, **KINDS[kind])
    found, lines = [], []
    cuts: tuple[tuple[int, ...], ...] = ((15,), (1, 7, 7), (5, 4, 3, 2, 1))
    with Session(config) as session:
        start = weights_of(session, tmp_path / "start")
        for number, cut in enumerate(cuts):
            session.load(None)
            first = 0
            for size in cut:
                session.forward_backward(records[first : first + size])
                first += size
            lines.append(session.step())
            found.append(weights_of(session, tmp_path / f"cut-{number}"))
        session.load(None)
        session.forward_backward(records, totals=session.totals(records))
        lines.append(session.step())
        found.append(weights_of(session, tmp_path / "known"))
    for line, weights in zip(lines, found, strict=True):
        assert line["num_documents"] == 15
        assert line["loss"] == pytest.approx(lines[-1]["loss"], rel=1e-5, abs=1e-7)
        assert line["grad_norm"] == pytest.approx(lines[-1]["grad_norm"], rel=1e-5)
        assert apart(weights, found[-1], start) < 1e-4  # Adam's first step divides each number by itself


def test_a_function_of_log_probs_has_autograds_gradient(tmp_path: Path) -> None:
    """DPO over pairs of documents, against one float64 graph of transformers' own model."""
    config, records = options(tmp_path, optimizer={"learning_rate": 1e-2, "gradient_clip": None})
    records = records[:6]

    def dpo(logprobs: Sequence[torch.Tensor], documents: Sequence[Rollout]) -> torch.Tensor:
        sums = [one.sum() for one in logprobs]
        pairs = zip(sums[::2], sums[1::2], strict=True)
        return -sum((torch.nn.functional.logsigmoid(0.1 * (a - b)) for a, b in pairs), torch.zeros(())) / 3

    with Session(config) as session:
        session.forward_backward(records, dpo)
        norm = session.gradient_norm()
        gradients = session.policy.weights.collect_gradients()
        documents = session.documents(records, needs_all=False)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64)
    setattr(model.get_input_embeddings(), "padding_idx", None)  # noqa: B010  (torch would keep the gradient of this row 0)
    exact = []
    for document in documents:
        ids = torch.tensor(document.input_ids)[None]
        logits = model(input_ids=ids).logits[0, :-1] / (document.temperature or 1.0)
        chosen = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        exact.append(chosen[torch.tensor(document.loss_mask[1:])])
    dpo(exact, documents).backward()
    expected = {name: value.grad for name, value in model.named_parameters()}
    assert gradients is not None
    square = 0.0
    for name, gradient in gradients.items():
        right = expected[name]
        assert right is not None
        assert (gradient.double().cpu() - right).norm() <= 1e-5 * max(float(right.norm()), 1e-3), name
        square += float(right.square().sum())
    assert norm == pytest.approx(square**0.5, rel=1e-5)


def test_losses_by_name_and_forward(tmp_path: Path) -> None:
    """A loss by name, next to the same loss as a function of log-probs."""
    config, records = options(tmp_path, optimizer={"learning_rate": 1e-2, "gradient_clip": None})
    with Session(config) as session:
        count = session.totals(records).num_labels
        scores = session.forward_backward(records, {"type": "cross_entropy"})
        by_name = session.gradient_norm()
        session.drop()
        session.forward_backward(records, lambda logprobs, _: -torch.cat(logprobs).sum() / count)
        assert session.gradient_norm() == pytest.approx(by_name, rel=1e-5)
        session.drop()
        for one, other in zip(scores, session.logprobs(records), strict=True):
            np.testing.assert_array_equal(one.logprobs, other)


def test_what_is_saved_goes_on_bitwise_and_is_exported(tmp_path: Path) -> None:
    config, records = options(tmp_path, **GRPO)

    def go_on(session: Session) -> dict[str, torch.Tensor]:
        for _ in range(2):
            session.forward_backward(records)
            session.step()
        return weights_of(session, tmp_path / "end")

    with Session(config) as session:
        session.forward_backward(records)
        session.step()
        kept = session.save(tmp_path / "kept")
        first = go_on(session)
        session.export(tmp_path / "exported", dtype="float32")
    with Session(config, weights=kept) as again:
        assert (again.steps, again.documents_seen) == (1, 15)
        shutil.rmtree(tmp_path / "end")
        assert same(first, go_on(again))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32)
    assert all(torch.equal(first[name], value.detach()) for name, value in model.named_parameters())


def test_calls_without_a_meaning_are_refused(tmp_path: Path) -> None:
    config, records = options(tmp_path, **GRPO)
    with Session(config) as session:
        with pytest.raises(SessionError, match="call forward_backward first"):
            session.step()
        session.forward_backward(records)
        with pytest.raises(SessionError, match="holds no gradient"):
            session.save(tmp_path / "kept")
        with pytest.raises(SessionError, match="same denominators"):
            session.forward_backward(records, totals=StepTotals(30, 100, 200))
        session.gradient_norm()
        with pytest.raises(SessionError, match="is complete"):
            session.forward_backward(records)
        session.drop()
        with pytest.raises(SessionError, match="not divided by anything"):
            session.forward_backward(records, lambda logprobs, _: logprobs[0].sum(), totals=session.totals(records))
        with pytest.raises(SessionError, match="give a section"):
            session.forward_backward(records, "gspo")  # type: ignore[arg-type]
        with pytest.raises(SessionError, match="one number that is computed from the log-probs"):
            session.forward_backward(records, lambda logprobs, documents: 1.0)  # type: ignore[arg-type, return-value]
        with pytest.raises(TruestepError, match="records:1: input_ids"):
            session.forward_backward([records[0], {**records[1], "id": "another", "input_ids": [-5, 3]}])
        with pytest.raises(SessionError, match="count is 0: draw one completion of a prompt or more"):
            session.sample([[3, 4]], count=0)
        with pytest.raises(SessionError, match="no documents"):
            session.forward_backward([])
        for prompts, given, problem in (
            ([[1, 2]], {"heat": 2}, "heat is unknown"),
            ([[1, 2]], {"temperature": -1}, "temperature cannot be -1"),
            ([[1, 2]], {"max_new_tokens": 0}, "max_new_tokens cannot be 0"),
            ([[1, 2]], {"stop": "END"}, "give a list of texts"),
            ([[1, 2], [5000]], {}, "prompt 1 has an id outside of the vocabulary"),
            ([[]], {}, "prompt 0 has no tokens"),
            ("text", {}, "not one text"),
            (["text"], {}, "has no tokenizer"),
        ):
            with pytest.raises(SampleError, match=problem):
                session.sample(prompts, **given)
        session.forward_backward(records)
        for rate in (math.nan, math.inf, -1e-3, 1e38, "1e-3", True):
            with pytest.raises(SessionError, match="the learning rate cannot be"):
                session.step(learning_rate=rate)  # type: ignore[arg-type]
        session.step(learning_rate=np.float32(1e-3))  # type: ignore[arg-type]
        session.save(tmp_path / "kept")
        with pytest.raises(SessionError, match="step-00000001 exists already"):
            session.save(tmp_path / "kept")
        before = session.steps, session.documents_seen
        with pytest.raises(SessionError, match="is no checkpoint of truestep"):
            session.load(tmp_path / "model")
        assert (session.steps, session.documents_seen) == before
        assert len(session.sample([np.array([1, 2])], max_new_tokens=2)[0][0].token_ids) <= 2
    with pytest.raises(SessionError, match=r"truncated: drop"):
        Session(config.changed({"data.truncated": "drop"}))
    with Session(config.changed({"parallel.pipeline": 1})) as session:
        session.config = config.changed({"parallel.pipeline": 2})
        with pytest.raises(SessionError, match="sampling cannot use"):
            session.sample([[1, 2]])


def test_a_call_that_fails_leaves_nothing_of_its_gradient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, records = options(tmp_path, **GRPO)
    with Session(config) as session:
        session.forward_backward(records)
        norm = session.gradient_norm()
        session.drop()
        session.forward_backward(records[:5])
        honest, calls = StepRunner._head, []

        def fails(self: StepRunner, *given: Any) -> Any:
            calls.append(1)
            if len(calls) == 2:
                raise RuntimeError("out of memory")
            return honest(self, *given)

        monkeypatch.setattr(StepRunner, "_head", fails)
        with pytest.raises(RuntimeError, match="out of memory"):
            session.forward_backward(records[5:])
        monkeypatch.undo()
        with pytest.raises(SessionError, match="call forward_backward first"):
            session.step()
        session.forward_backward(records[:5])
        session.forward_backward(records[5:])
        assert session.gradient_norm() == pytest.approx(norm, rel=1e-5)


def test_an_update_that_fails_leaves_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, records = options(tmp_path, **GRPO)

    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("out of memory")

    with Session(config) as session:
        path = session.save(tmp_path / "begin")
        session.forward_backward(records)
        norm = session.gradient_norm()
        session.drop()
        for name in ("gradient_norm", "update"):
            session.forward_backward(records)
            with monkeypatch.context() as fault:
                fault.setattr(Learner, name, fails)
                with pytest.raises(RuntimeError, match="out of memory"):
                    session.step()
            if name == "gradient_norm":
                with pytest.raises(SessionError, match="call forward_backward first"):
                    session.step()
        for call in (lambda: session.sample([[1, 2]]), lambda: session.forward_backward(records), session.step):
            with pytest.raises(SessionError, match=r"load a checkpoint|call forward_backward first"):
                call()
        with pytest.raises(SessionError, match="load a checkpoint"):
            session.sample([[1, 2]])
        session.load(path)
        session.forward_backward(records)
        assert session.step()["grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_a_loss_of_one_call_has_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reference, advantages and labels that are chosen are those of the call's loss, not of the session's."""
    section = {"type": "grpo", "normalize_by": "labels", "kl_reference": {"weight": 0.5}}
    config, records = options(tmp_path, loss=section)
    plain = config.changed({"loss": {"type": "cross_entropy"}})
    norms, loaded = [], []
    honest = losses.make_policy

    def make_policy(*given: Any, **named: Any) -> Any:
        loaded.append(named.get("frozen", False))
        return honest(*given, **named)

    for module in (session_module, losses):
        monkeypatch.setattr(module, "make_policy", make_policy)
    for own, given in ((config, None), (plain, section)):
        with Session(own) as session:
            session.forward_backward(records, {"type": "cross_entropy"})
            session.step()  # so that the reference differs
            for _ in range(2):
                session.drop()
                session.forward_backward(records, given)
            norms.append(session.gradient_norm())
    assert loaded == [False, True] * 2, "each session's policy, and its reference once"
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


def test_groups_are_whole_whatever_the_configuration_says(tmp_path: Path) -> None:
    config, records = options(tmp_path, data={"advantages": "group_mean", "group_size": 4})
    same = [{**record, "group_id": "one", "reward": float(number > 3)} for number, record in enumerate(records[:8])]
    same = [{name: value for name, value in record.items() if name != "advantage"} for record in same]
    with Session(config) as session:
        for number, document in enumerate(session.documents(same)):
            assert document.advantages is not None
            assert np.all(document.advantages[document.loss_mask] == (0.5 if number > 3 else -0.5))


def test_a_session_may_stand_still_between_calls(tmp_path: Path) -> None:
    config, records = options(tmp_path, **GRPO, schedule={"stall_timeout": 1.0})
    with Session(config) as session:
        session.forward_backward(records)
        time.sleep(5.0)
        assert session.step()["num_documents"] == 15


def test_the_value_of_a_function_is_the_step_s_loss(tmp_path: Path) -> None:
    config, records = options(tmp_path, **GRPO)
    given: list[float] = []

    def loss(logprobs: Sequence[torch.Tensor], _: Sequence[Rollout]) -> torch.Tensor:
        value = torch.cat(list(logprobs)).square().mean()
        given.append(float(value.detach()))
        return value

    with Session(config) as session:
        session.forward_backward(records[:7], loss)
        session.forward_backward(records[7:], loss)
        line = session.step()
    assert line["loss"] == pytest.approx(sum(given))
    assert "advantage" not in line and line["num_documents"] == 15


def test_a_mixture_s_samples_name_their_experts(tmp_path: Path) -> None:
    model = expert_model(tmp_path / "model")
    rollouts = write_rollouts(tmp_path / "rollouts.jsonl", 5)
    assert rollouts
    config = file_config(model, tmp_path / "rollouts.jsonl", tmp_path / "run", **GRPO)
    with Session(config.changed({"model.experts.replay": "require"})) as session:
        samples = session.sample([[3, 4, 5], [6, 7]], count=2, max_new_tokens=5)
        records = [one.record(advantage=1.0) for group in samples for one in group]
        session.forward_backward(records)
        line = session.step()
    assert line["replayed_tokens"] > 0 and line["route_disagreement"] == 0


def test_what_needs_the_whole_step_is_refused_without_its_counts(tmp_path: Path) -> None:
    bonus = {"type": "grpo", "normalize_by": "labels", "entropy_bonus": 0.1, "entropy_normalize_by": "documents"}
    every: tuple[dict[str, Any], ...] = (
        {"loss": bonus},
        {"data.advantages": "batch_normalized"},
        {"model.experts.balance": "loss"},
    )
    for number, changes in enumerate(every):
        folder = tmp_path / str(number)
        folder.mkdir()
        if "model.experts.balance" in changes:
            expert_model(folder / "model")
        config, records = options(folder)
        config = config.changed(changes)
        grouped = [{**record, "group_id": str(place // 5), "reward": place % 3} for place, record in enumerate(records)]
        if "data.advantages" in changes:
            grouped = [{name: value for name, value in one.items() if name != "advantage"} for one in grouped]
        with Session(config) as session:
            with pytest.raises(SessionError, match="give `totals"):
                session.forward_backward(grouped)
            if number:  # a part of the step is not enough, even with the whole step's counts
                with pytest.raises(SessionError, match="all documents of the step in one call"):
                    session.forward_backward(grouped[:10], totals=session.totals(grouped))
            session.forward_backward(grouped, totals=session.totals(grouped))
            assert session.gradient_norm() > 0


def many_calls(config: dict[str, Any], records: list[dict[str, Any]], folder: str) -> None:
    with Session(Config.model_validate(config)) as session:
        for cut in ((0, 15), (0, 4, 15)):
            for first, end in pairwise(cut):
                session.forward_backward(records[first:end])
            line = session.step()
        samples = session.sample([[3, 4], [5], [6, 7]], count=2, temperature=0.0, max_new_tokens=4)
        session.forward_backward(records, lambda logprobs, _: torch.cat(logprobs).square().mean())
        line["by function"] = session.gradient_norm()
        session.drop()
        session.save(folder)
    (Path(folder) / "line.json").write_text(
        json.dumps({"line": line, "samples": [[one.token_ids for one in group] for group in samples]})
    )


@pytest.mark.parametrize("parallel", [{"data_shard": 2}, {"data_shard": 1, "data_replicate": 2}, {"tensor": 2}])
def test_two_ranks_are_one(parallel: dict[str, int], tmp_path: Path) -> None:
    config, records = options(tmp_path, **GRPO, optimizer={"epsilon": 1e-3})
    plain = config.model_dump(exclude_unset=True)
    many_calls(plain, records, str(tmp_path / "one"))
    on_ranks(2, many_calls, plain | {"parallel": parallel}, records, str(tmp_path / "two"))
    one, two = (json.loads((tmp_path / name / "line.json").read_text()) for name in ("one", "two"))
    assert one["samples"] == two["samples"]
    for name in ("loss", "grad_norm", "by function", "num_labels", "ratio_new_old"):
        where = (one["line"][name], two["line"][name])
        assert where[0] == pytest.approx(where[1], rel=1e-4, abs=1e-7), name
    weights = [read_weights(sorted((tmp_path / name).glob("step-*"))[-1]) for name in ("one", "two")]
    for name, value in weights[0].items():
        assert (value - weights[1][name]).abs().max() < 1e-5, name


def test_the_page_s_loop_and_loss_run_as_they_stand_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "session.md").read_text(encoding="utf-8")
    loop, dpo, critic, adapters, twins = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    prompts = sort_prompts(2)
    model, file = word_model(tmp_path / "model"), write_lines(tmp_path / "prompts.jsonl", prompts)
    (tmp_path / "run.yaml").write_text(dump_config(sampled_config(model, file, tmp_path / "run")), encoding="utf-8")
    exec(compile(loop, "docs/session.md", "exec"), {"tasks": [(one["prompt"], one["answer"]) for one in prompts]})
    assert (tmp_path / "runs" / "mine" / "step-00000002" / "truestep" / "state.json").is_file()
    (tmp_path / "of records").mkdir()
    config, records = options(tmp_path / "of records")
    records = [{**record, "reference_logprobs": record["logprobs"]} for record in records[:6]]
    with Session(config) as session:
        exec(compile(dpo, "docs/session.md", "exec"), {"session": session, "records": records, "torch": torch})
        assert session.gradient_norm() > 0
        named: dict[str, Any] = {"YES": 3, "NO": 4}
        exec(compile(critic, "docs/session.md", "exec"), named)
        assert [len(one) for one in named["values"](session, records)] == [
            one.num_labels for one in session.documents(records, needs_all=False)
        ]
    own = sampled_config(model, file, tmp_path / "run").changed({"adapter.rank": 4})
    (tmp_path / "run.yaml").write_text(dump_config(own), encoding="utf-8")
    some = {"input_ids": [3, 4, 5, 6], "prompt_length": 2, "logprobs": [-1.0] * 4, "advantage": 1.0, "group_id": "1"}
    given: dict[str, Any] = {
        "Session": Session,
        "records": [{**some, "reward": 1.0}],
        "others": [{**some, "reward": 0.0}],
    }
    exec(compile(adapters, "docs/session.md", "exec"), given)
    assert (given["maths"].steps, given["code"].steps, given["code"].policy.adapter.rank) == (1, 0, 8)

    async def train(adapter: Session) -> None:
        await adapter.forward_backward_async(given["records"])
        await adapter.step_async()

    with Session("run.yaml") as session:
        names = {"asyncio": asyncio, "train": train, "session": session}
        code = compile(twins, "docs/session.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        asyncio.run(types.FunctionType(code, names)())
        assert {name: one.steps for name, one in session.adapters.items()} == {"maths": 1, "code": 1}
