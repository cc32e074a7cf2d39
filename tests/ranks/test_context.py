"""One micro-batch's tokens over several ranks: still the step of one process, against the float64 oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from oracles.step import oracle_logprobs, oracle_step
from ranks.cases import on_ranks, refuse_to_mix_tokens, score_all, score_padded, train_all
from ranks.test_layouts import Layout, Model, gradient_error, loss_of, make_case, options, read
from ranks.test_train_over_ranks import check_same_run, config
from scoring import check_against_oracle, write_records
from selection import long_except
from small_runs import read_lines, sort_prompts, without_times, word_model, write_lines, write_rollouts
from tiny import VOCABULARY, make_model, make_records, set_old_logprobs
from truestep.errors import TruestepError
from truestep.model.loading.load import load_policy
from truestep.ranks.axes import RankLayout
from truestep.ranks.group import Ranks


@pytest.mark.long
def test_with_data_ranks_beside(tiny_model: Model, tmp_path: Path) -> None:
    """Sharded, replicated, breadth-first, reduced each time, padded, and in chunks of few rows."""
    layouts: list[Layout] = [
        ({"context": 2}, 2, 24),
        ({"context": 2, "data_replicate": 2}, 1, 40),
        ({"context": 2, "reduce_each_micro_batch": True, "reshard_after_forward": False}, 1, 40),
    ]
    runs, cases = [], []
    for name in ("gspo", "cispo"):
        model, rollouts, records = make_case("qwen3_tied", loss_of(name), tiny_model, tmp_path)
        for number, layout in enumerate(layouts):
            given = options(model, rollouts, loss_of(name), layout)
            given["model"]["head"] = {"logits_chunk_size": (3, 5, 100)[number]}
            given["data"]["pad_to_multiple"] = (3, 8, 1)[number]
            output = tmp_path / f"{name}-{number}"
            runs.append((given, str(output)))
            cases.append((oracle_step(model, records, given), output))
    on_ranks(4, score_all, runs)
    for oracle, output in cases:
        check_against_oracle(read(output), oracle)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "heads"),
    [
        ("llama", {"num_attention_heads": 4, "num_key_value_heads": 1}),
        ("qwen3", {"num_attention_heads": 8, "num_key_value_heads": 2}),
        # Three query heads a rank, two of them to a key-value head: no share is like another.
        ("gemma2", {"num_attention_heads": 12, "num_key_value_heads": 6, "hidden_size": 48}),
    ],
    ids=["1 for 4", "2 for 4", "6 for 4"],
)
def test_key_value_heads_that_ranks_do_not_divide(kind: str, heads: dict[str, int], tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", kind, **heads, head_dim=8)
    loss = loss_of("gspo")
    _, rollouts, records = make_case(kind, loss, lambda kind: model, tmp_path)
    given = options(model, rollouts, loss, ({"context": 4}, 1, 64))
    on_ranks(4, score_all, [(given, str(tmp_path / "out"))])
    check_against_oracle(read(tmp_path / "out"), oracle_step(model, records, given))


def long_document(model: Path, tokens: int, labels: int) -> dict[str, Any]:
    record = make_records(3, documents=6, max_length=tokens)[4]
    assert len(record["input_ids"]) == tokens
    mask = [0] * (tokens - labels) + [1] * labels
    record = {name: record[name] for name in ("id", "input_ids")} | {"loss_mask": mask, "advantage": 0.7, "reward": 1.0}
    set_old_logprobs([record], oracle_logprobs(model, [record]), level="document")
    return record


@pytest.mark.long
@pytest.mark.parametrize("kind", ["gemma2"])
def test_one_document_over_four_ranks_and_anything_in_the_padding(kind: str, tiny_model: Model, tmp_path: Path) -> None:
    """35 labels, on every rank; 6 on the first of four, the others holding padding alone; and one, at the end."""
    model = tiny_model(kind)
    poisons = (None, VOCABULARY, -(2**63), 2**63 - 1)
    runs, cases = [], []
    for number, (tokens, labels, multiple) in enumerate([(37, 35, 8), (9, 6, 32), (37, 1, 1)]):
        record = long_document(model, tokens, labels)
        rollouts = write_records(tmp_path / f"{number}.jsonl", [record])
        given = options(model, rollouts, loss_of("gspo"), ({"context": 4}, 1, 64))
        given["data"]["pad_to_multiple"] = multiple
        outputs = [tmp_path / f"{number}-{place}" for place in range(len(poisons))]
        runs += [(given, str(output), poison) for output, poison in zip(outputs, poisons, strict=True)]
        cases.append((oracle_step(model, [record], given), outputs))
    on_ranks(4, score_padded, runs)
    for oracle, outputs in cases:
        clean = read(outputs[0])
        check_against_oracle(clean, oracle)
        for output in outputs[1:]:
            poisoned = read(output)
            assert poisoned.step == clean.step and poisoned.documents == clean.documents
            assert all(torch.equal(poisoned.gradients[name], gradient) for name, gradient in clean.gradients.items())


@pytest.mark.parametrize("loss", long_except(["grpo", "gspo"], "gspo"))
def test_more_ranks_than_labels(loss: str, tiny_model: Model, tmp_path: Path) -> None:
    """Two labels in all, on one of two data ranks or both; and a step of no label at all."""
    model = tiny_model("llama")
    masks = ([0, 1], [0, 0, 0, 0, 0, 1], [0] * 9, [0])
    draw = torch.Generator().manual_seed(3)
    records = [
        {
            "id": f"few-{number}",
            "input_ids": torch.randint(VOCABULARY, (len(mask),), generator=draw).tolist(),
            "loss_mask": mask,
            "advantage": 1.5,
        }
        for number, mask in enumerate(masks)
    ]
    set_old_logprobs(records, oracle_logprobs(model, records))
    for record in records[2:]:
        record["logprobs"] = []
    few = write_records(tmp_path / "few.jsonl", records)
    none = write_records(tmp_path / "none.jsonl", records[2:])
    runs = []
    layouts = {"few": (few, 4, 64), "smallest": (few, 4, 9), "beside": (few, 2, 64), "smallest beside": (few, 2, 9)}
    for name, (file, size, budget) in {**layouts, "none": (none, 4, 64)}.items():
        runs.append((options(model, file, loss_of(loss), ({"context": size}, 1, budget)), str(tmp_path / name)))
    on_ranks(4, score_all, runs)
    for name in layouts:
        check_against_oracle(read(tmp_path / name), oracle_step(model, records, runs[0][0]))
    nothing = read(tmp_path / "none")
    assert nothing.step["loss"] == 0 and nothing.step["num_labels"] == 0
    assert all(not gradient.any() for gradient in nothing.gradients.values())


@pytest.mark.long
def test_half_precision_is_no_further_off_than_one_process(tiny_model: Model, tmp_path: Path) -> None:
    """In bfloat16 the error against float64 is at most 1.5 times the one process's."""
    loss = loss_of("gspo")
    model, rollouts, records = make_case("gemma2", loss, tiny_model, tmp_path)
    plain = options(model, rollouts, loss, ({}, 1, 64))
    half = plain | {"model": {**plain["model"], "dtype": "bfloat16", "head": {"fp32_lm_head": True}}}
    on_ranks(2, score_all, [(half | {"parallel": {"context": 2}}, str(tmp_path / "half"))])
    on_ranks(1, score_all, [(half, str(tmp_path / "one"))])
    oracle = oracle_step(model, records, plain)
    assert 1e-4 < gradient_error(tmp_path / "half", oracle) <= 1.5 * gradient_error(tmp_path / "one", oracle)


@pytest.mark.long
def test_parts_belong_to_data_ranks(tiny_model: Model, tmp_path: Path) -> None:
    """Two parts over four ranks, two of which share each; the run is that of two ranks, also over a restart."""
    for rank, size in enumerate((5, 20)):
        write_lines(tmp_path / f"part-{rank}.jsonl", make_records(rank, documents=size))
    parts, model = tmp_path / "part-{rank}.jsonl", tiny_model("llama")
    runs = [config(model, parts, tmp_path / "run", parallel={"context": 2}, schedule={"steps": s}) for s in (2, None)]
    on_ranks(4, train_all, runs)
    on_ranks(2, train_all, [config(model, parts, tmp_path / "pair")])
    check_same_run(tmp_path / "run", tmp_path / "pair")
    assert sum(line["num_documents"] for line in read_lines(tmp_path / "run" / "ledger.jsonl")) == 25
    on_ranks(4, score_all, [(config(model, parts, tmp_path / "x", parallel={"context": 2}), str(tmp_path / "scored"))])
    assert len(read_lines(tmp_path / "scored" / "scores.jsonl")) == 25


@pytest.mark.long
def test_sampling_and_evaluation_need_no_other_rank(tmp_path: Path) -> None:
    prompts = write_lines(tmp_path / "prompts.jsonl", sort_prompts(5))
    model = word_model(tmp_path / "model")

    def given(run: str, **parallel: int) -> dict[str, Any]:
        base = config(model, "unused", tmp_path / run, checkpoint={"every": 0}, parallel=parallel)
        base["data"] = {"group_size": 4, "tokens_per_microbatch": 64}
        sampler = {"prompts": str(prompts), "reward": "plain_rewards:digit_reward", "max_new_tokens": 6}
        schedule = {"docs_per_step": 12, "steps": 2, "stall_timeout": 30}
        return base | {"sampler": sampler, "evaluation": {"prompts": str(prompts), "every": 1}, "schedule": schedule}

    on_ranks(1, train_all, [given("alone")])
    on_ranks(2, train_all, [given("over", context=2)])
    check_same_run(tmp_path / "over", tmp_path / "alone")
    mine, theirs = (without_times(read_lines(tmp_path / run / "evaluation.jsonl")) for run in ("over", "alone"))
    assert [line["greedy_reward"] for line in mine] == [line["greedy_reward"] for line in theirs]


def test_heads_that_ranks_cannot_share_are_refused_before_weights_are_read(
    tiny_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    def read_weights(*arguments: Any, **options: Any) -> None:
        raise AssertionError("nothing is to be allocated")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", read_weights)
    with pytest.raises(TruestepError, match=r"parallel\.context: 3 does not divide the model's 4 query heads"):
        load_policy(tiny_model("llama"), ranks=Ranks(layout=RankLayout(data_shard=1, context=3)))


def test_a_model_that_mixes_tokens_outside_attention_is_refused(tiny_model: Model, tmp_path: Path) -> None:
    """Each of its documents is computed alone, so that packing does it no harm, and yet it cannot be cut."""
    rollouts = tmp_path / "rollouts.jsonl"
    write_rollouts(rollouts, 3)
    given = config(tiny_model("llama"), rollouts, tmp_path / "run", parallel={"context": 2})
    with pytest.raises(TruestepError, match=r"tokens over 2 ranks \(parallel\.context\) give other values"):
        on_ranks(2, refuse_to_mix_tokens, given)
