"""The loops of examples/python: the gradient of each is a float64 oracle's, however its step is cut into calls, and on
two ranks as on one."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from api.test_session import apart
from checkpoints import read_weights
from ranks.cases import on_ranks
from small_runs import file_config, write_rollouts
from tiny import make_model
from truestep import Rollout, Session
from truestep.commands.session.errors import SessionError
from truestep.config.schema import Config

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "python"))
import own_distillation
import own_dpo
import own_gspo
import own_loop
import own_ppo
import own_sft

PROGRAMS = (own_distillation, own_dpo, own_gspo, own_loop, own_ppo, own_sft)
COUNT = 8
Records = list[dict[str, Any]]
LOSSES = {
    "grpo": {"type": "grpo", "normalize_by": "labels"},
    "gspo": {**own_gspo.GSPO, "epsilon_low": 0.05, "epsilon_high": 0.05},
    "supervised": own_sft.SUPERVISED,
    "distillation": own_distillation.REVERSE_KL,
    "ppo": own_ppo.CLIPPED,
}
LOOPS = (*LOSSES, "dpo", "value")


def options(folder: Path) -> tuple[Config, Records]:
    for number, name in enumerate(("model", "other")):
        make_model(folder / name, "llama", seed=number)
    records = [dict(record) for record in write_rollouts(folder / "rollouts.jsonl", 40)]
    records = [one for one in records if sum(_mask(one)) > 1][:COUNT]
    for number, record in enumerate(records):
        record |= {"advantage": number - 3.25, "reward": float(number % 3), "temperature": 1.0}
    config = file_config(folder / "model", folder / "rollouts.jsonl", folder / "run", loss=LOSSES["grpo"])
    return config.changed({"optimizer.epsilon": 1e-3, "optimizer.gradient_clip": None}), records


def _mask(record: dict[str, Any]) -> list[int]:
    length = len(record["input_ids"])
    return record.get("loss_mask") or [int(at >= record["prompt_length"]) for at in range(length)]


def prepared(loop: str, session: Session, other: Session, records: Records) -> Records:
    """What a loop makes of records before its gradient, by the other model where it needs one."""
    if loop in ("distillation", "dpo"):
        own = session.logprobs(records)
        records = [{**one, "logprobs": each.tolist()} for one, each in zip(records, own, strict=True)]
    if loop == "distillation":
        return own_distillation.compared(records, other)[0]
    if loop == "dpo":
        found = other.logprobs(records)
        return [{**one, "reference_logprobs": each.tolist()} for one, each in zip(records, found, strict=True)]
    if loop in ("ppo", "value"):
        found = own_ppo.values(other if loop == "ppo" else session, records)
        advantages = [own_ppo.gae(each, one["reward"]) for each, one in zip(found, records, strict=True)]
        if loop == "ppo":
            return [{**one, "advantage": each.tolist()} for one, each in zip(records, advantages, strict=True)]
        returns = [value + each for value, each in zip(found, advantages, strict=True)]
        return [{**one, "returns": each} for one, each in zip(records, returns, strict=True)]
    return records


def accumulate(loop: str, session: Session, records: Records, cut: Sequence[int], *, known: bool = False) -> None:
    """The gradient of a loop's step, in calls that begin at these records. `known`: with the counts of the step."""
    plain = [{name: value for name, value in one.items() if name != "returns"} for one in records]
    totals = session.totals(plain) if known else None
    for first, end in pairwise((*cut, len(records))):
        if loop == "dpo":
            session.forward_backward(plain[first:end], own_dpo.dpo)
        elif loop == "value":
            own_ppo.fit(session, plain[first:end], [one["returns"] for one in records[first:end]])
        else:
            session.forward_backward(plain[first:end], LOSSES[loop], totals=totals)


# The losses in float64, over the log-probs of the labels, from the definitions of docs/contract.md alone.


def clipped(own: torch.Tensor, one: Rollout) -> torch.Tensor:
    ratio, advantage = (own - labels(one, one.logprobs)).exp(), labels(one, one.advantages)
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)


def whole(own: torch.Tensor, one: Rollout) -> torch.Tensor:
    """GSPO's mean over a document with one advantage."""
    ratio, advantage = (own - labels(one, one.logprobs)).mean().exp(), labels(one, one.advantages)[0]
    return -torch.minimum(ratio * advantage, ratio.clamp(0.95, 1.05) * advantage)[None]


ORACLES: dict[str, Callable[[torch.Tensor, Rollout], torch.Tensor]] = {
    "grpo": clipped,
    "ppo": clipped,
    "gspo": whole,
    "supervised": lambda own, one: -own,
    # The ratio is 1: the log-probs are the policy's own.
    "distillation": lambda own, one: -labels(one, one.advantages) * own,
}


def labels(document: Rollout, values: np.ndarray | None) -> torch.Tensor:
    assert values is not None
    return torch.tensor(values[document.loss_mask], dtype=torch.float64)


def exact(folder: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    setattr(model.get_input_embeddings(), "padding_idx", None)  # noqa: B010  (torch would keep this row's gradient 0)
    return model


def value_of(model: Any, document: Rollout) -> torch.Tensor:
    """The value before each label: a head, which is the difference of two rows of the model's, on the hidden state."""
    ids, mask = torch.tensor(document.input_ids)[None], torch.tensor(document.loss_mask[1:])
    hidden = model(input_ids=ids, output_hidden_states=True).hidden_states[-1][0, :-1][mask]
    head = model.get_output_embeddings().weight
    return hidden @ (head[own_ppo.TOKENS[0]] - head[own_ppo.TOKENS[1]])


def oracle(loop: str, model: Any, documents: Sequence[Rollout], records: Records) -> torch.Tensor:
    terms, gains = [], []
    for document, record in zip(documents, records, strict=True):
        ids, mask = torch.tensor(document.input_ids)[None], torch.tensor(document.loss_mask[1:])
        own = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0][mask]
        if loop == "value":
            value = value_of(model, document)
            found = value.detach().numpy()
            returns = found + own_ppo.gae(found, record["reward"])
            terms.append(0.5 * (value - torch.tensor(returns)).square())
        elif loop == "dpo":
            gains.append((own - labels(document, document.reference_logprobs)).sum())
        else:
            terms.append(ORACLES[loop](own, document))
    if loop == "dpo":
        pairs = zip(gains[::2], gains[1::2], strict=True)
        return torch.stack([torch.log1p(torch.exp(-0.1 * (better - worse))) for better, worse in pairs]).sum()
    total = torch.cat(terms)
    return total.sum() if loop == "value" else total.mean()


@pytest.mark.parametrize("loop", LOOPS)
def test_the_gradient_is_the_oracle_s_however_the_step_is_cut(loop: str, tmp_path: Path) -> None:
    config, records = options(tmp_path)
    other = Session(config.changed({"model.path": str(tmp_path / "other")}))
    with Session(config) as session:
        records = prepared(loop, session, other, records)
        accumulate(loop, session, records, (0,), known=True)
        norm = session.gradient_norm()
        cuts = [session.policy.weights.collect_gradients()]
        plain = [{name: value for name, value in one.items() if name != "returns"} for one in records]
        documents = session.documents(plain, needs_all=False)
        for cut in ((0, 2), (0, 2, 4, 6)):
            session.drop()
            accumulate(loop, session, records, cut)
            assert session.gradient_norm() == pytest.approx(norm, rel=1e-5)
            cuts.append(session.policy.weights.collect_gradients())
    model = exact(tmp_path / "model")
    oracle(loop, model, documents, records).backward()
    right = {name: value.grad for name, value in model.named_parameters()}
    length = sum(float(one.square().sum()) for one in right.values() if one is not None) ** 0.5
    assert norm == pytest.approx(length, rel=1e-5)
    for gradients in cuts:
        own = {name: gradient.double().cpu() for name, gradient in gradients.items()}
        # Before the step those of calls without totals are not divided yet, as their norm, which is compared above, is.
        scale = length / sum(float(gradient.square().sum()) for gradient in own.values()) ** 0.5
        for name, gradient in own.items():
            one = right[name]
            assert one is not None
            assert float((scale * gradient - one).norm()) <= 1e-5 * max(float(one.norm()), 1e-6 * length), name


def test_values_are_those_of_a_head(tmp_path: Path) -> None:
    config, records = options(tmp_path)
    with Session(config) as session:
        documents, found = session.documents(records, needs_all=False), own_ppo.values(session, records)
    model = exact(tmp_path / "model")
    for value, document in zip(found, documents, strict=True):
        np.testing.assert_allclose(value, value_of(model, document).detach().numpy(), atol=2e-6)
    assert max(abs(value).max() for value in found) > 1e-2


def step_each(
    config: dict[str, Any], records: Records, other: str, folder: str, cuts: tuple[tuple[int, ...], ...]
) -> None:
    """A step of each loop, from the model as it was, cut into calls in each way. Keep its gradient and its weights."""
    given = Config.model_validate(config)
    second = Session(given.changed({"model.path": other}))
    with Session(given) as session:
        for loop in LOOPS:
            for number, cut in enumerate(cuts):
                session.load(None)
                accumulate(loop, session, prepared(loop, session, second, records), cut)
                session.gradient_norm()
                gradients = session.policy.weights.collect_gradients()
                norm = session.step()["grad_norm"]
                path = session.save(Path(folder) / loop / str(number))
                if gradients:  # the first rank has them
                    torch.save((norm, gradients), path.parent / "gradients.pt")
        session.load(None)
        session.save(Path(folder) / "start")


@pytest.mark.long
def test_two_ranks_are_one(tmp_path: Path) -> None:
    """The step of two ranks is cut into other calls than that of one."""
    cuts = ((0,), (0, 2, 4, 6))
    config, records = options(tmp_path)
    plain, other = config.model_dump(exclude_unset=True), str(tmp_path / "other")
    step_each(plain, records, other, str(tmp_path / "one"), ((0, 2),))
    on_ranks(2, step_each, plain | {"parallel": {"data_shard": 2}}, records, other, str(tmp_path / "two"), cuts)
    start = read_weights(next((tmp_path / "two" / "start").glob("step-*")))
    for loop in LOOPS:
        first = tmp_path / "one" / loop / "0"
        norm, gradients = torch.load(first / "gradients.pt")
        weights = read_weights(next(first.glob("step-*")))
        for number in range(len(cuts)):
            second = tmp_path / "two" / loop / str(number)
            found, theirs = torch.load(second / "gradients.pt")
            assert found == pytest.approx(norm, rel=1e-5), (loop, number)
            length = sum(float(gradient.double().square().sum()) for gradient in gradients.values()) ** 0.5
            for name, gradient in gradients.items():
                off = float((theirs[name].double() - gradient.double()).norm())
                assert off <= 1e-5 * max(float(gradient.double().norm()), 1e-6 * length), (loop, number, name)
            assert apart(read_weights(next(second.glob("step-*"))), weights, start) < 1e-4, (loop, number)


def test_programs_have_few_lines() -> None:
    for program in PROGRAMS:
        lines = inspect.getsource(program).splitlines()
        assert len(lines) <= (60 if program is own_ppo else 40), program


def test_advantages_are_sums_of_what_was_not_expected() -> None:
    draw = np.random.default_rng(0)
    for length in (1, 2, 9):
        values, reward, gamma, decay = draw.normal(size=length), 1.5, 0.9, 0.8
        after = [*(gamma * values[1:]), reward]
        surprises = [float(after[at] - values[at]) for at in range(length)]
        expected = [
            sum((gamma * decay) ** (later - at) * surprises[later] for later in range(at, length))
            for at in range(length)
        ]
        np.testing.assert_allclose(own_ppo.gae(values, reward, gamma, decay), expected, rtol=1e-12)


def test_tokens_that_are_not_of_the_vocabulary(tmp_path: Path) -> None:
    config, records = options(tmp_path)
    with Session(config) as session:
        for tokens in ([], [-1], [1, 10**6]):
            with pytest.raises(SessionError, match="give ids of the vocabulary"):
                session.with_targets(records, tokens)
