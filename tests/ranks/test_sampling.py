"""Tensor ranks sample together what one process samples: the same tokens and log-probs, whatever comes between."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from completing import Asked, Completion, How, decode
from generate.engine.recurrent_models import made
from generate.engine.test_engine import options, requests, run, same
from generate.engine.test_gpu_path import in_graphs, replay
from plain_rewards import letter_reward
from ranks.cases import on_ranks, train_all
from ranks.test_train_over_ranks import check_same_run, config
from raters import DirectRater
from selection import long_except
from small_runs import read_lines, sort_prompts, tokenised_model, without_times, word_model, write_lines
from tiny import make_model
from truestep.environments.prompts import Prompt
from truestep.environments.rewards import Rating
from truestep.generate.engine import engine as engine_module
from truestep.generate.engine import plain as plain_module
from truestep.generate.engine.attend import UnservedError
from truestep.generate.engine.engine import Engine, Limits, engine_of
from truestep.generate.engine.graphs import Graphs
from truestep.generate.engine.phase import EngineSettings, Phase
from truestep.generate.engine.service import EngineGenerator
from truestep.generate.engine.team import DisagreementError
from truestep.generate.evaluate import Evaluator
from truestep.generate.generator import Generate
from truestep.generate.play import SingleTurn
from truestep.generate.read import reader
from truestep.model.fast import compiled
from truestep.model.loading.load import load_policy
from truestep.model.policy import Policy
from truestep.process import progress
from truestep.ranks.axes import RankError, RankLayout
from truestep.ranks.group import Ranks, join, leave
from truestep.ranks.watch import Watch
from truestep.rollouts.source import Interrupted, never

Model = Callable[[str], Path]

ENDS = frozenset(range(3))
PLAIN = options(stop_ids=ENDS)
GREEDY = options(temperature=0.0, stop_ids=ENDS)
CUT = options(temperature=0.7, top_p=0.8, top_k=20, stop_ids=ENDS)
FULL = options(max_new_tokens=14)
BATCHES = options(stop_ids=ENDS, batch_size=3, engine=False)


def asked() -> list[Asked]:
    """Seven prompts, longer and shorter than a page and than a window, and three that share one of them."""
    some = requests((3, 21, 1, 9, 12, 2, 5))
    return some + [Asked(some[1].input_ids, (8, number)) for number in range(3)]


@dataclass(frozen=True)
class Case:
    """A model, how it is sampled, and what one process gives."""

    model: Path
    how: How
    expected: list[Completion]


def cases(model: Path, *hows: How) -> list[Case]:
    policy = load_policy(model)
    return [Case(model, how, decode(policy, asked(), how)) for how in hows]


def joined(**parallel: int) -> Ranks:
    return join(RankLayout(**parallel), device="cpu", stall_timeout=60)


def sample(given: Sequence[Case], parallel: dict[str, int]) -> None:
    ranks = joined(**parallel)
    policies: dict[Path, Policy] = {}
    for case in given:
        policy = policies.get(case.model) or policies.setdefault(case.model, load_policy(case.model, ranks=ranks))
        assert isinstance(engine_of_gathered(policy), Engine)
        ended: set[int] = set()
        found = decode(policy, asked(), case.how, lambda number, _, ended=ended: ended.add(number))
        for mine, theirs in zip(found, case.expected, strict=True):
            same(mine, theirs)
        told = ranks.gather(ended)
        assert sorted(number for part in told for number in part) == list(range(len(found))), "each is told of once"
        assert all(told), "and every rank rates some"


def engine_of_gathered(policy: Policy) -> Engine | str:
    with torch.no_grad(), policy.weights.gathered():
        return engine_of(policy)


def test_completions_are_those_of_one_process(tiny_model: Model) -> None:
    """Windows, softcaps, a tied head, scaled embeddings; every kind of draw; with the engine and without it."""
    given = [
        *cases(tiny_model("llama"), PLAIN, BATCHES),
        *cases(tiny_model("gemma2"), CUT, GREEDY),
        *cases(tiny_model("qwen3_tied"), PLAIN),
        *cases(tiny_model("granite"), CUT),
    ]
    on_ranks(2, sample, given, {"tensor": 2})


@pytest.mark.parametrize("parallel", long_except([{"tensor": 2}, {"data_shard": 2}], {"tensor": 2}))
def test_layers_that_keep_states_too(parallel: dict[str, int], tmp_path: Path) -> None:
    """Each tensor rank computes them whole."""
    on_ranks(2, sample, cases(made(tmp_path)("qwen3_5_text"), PLAIN), parallel)


def sample_in_graphs(given: Sequence[Case], fails_on: int | None) -> None:
    """Steps are replayed on the same memory, layers are compiled, and what ranks exchange is a part of both."""
    ranks = joined(tensor=2)
    with pytest.MonkeyPatch.context() as patch:
        made = replay(patch)
        patch.setattr(compiled, "BACKEND", "eager")
        if ranks.rank == fails_on:
            patch.setattr(Graphs, "_capture", fail_to_capture)
            patch.setattr(torch.cuda, "synchronize", lambda *_: None)
        for case in given:
            engine = engine_of_gathered(policy := load_policy(case.model, ranks=ranks))
            assert isinstance(engine, Engine)
            in_graphs(engine).device.compiles = fails_on is None
            for _ in range(2):
                for mine, theirs in zip(decode(policy, asked(), case.how), case.expected, strict=True):
                    same(mine, theirs)
            assert engine.graphs is not None
            assert bool(len(engine.graphs)) == (fails_on is None)
            assert ranks.gather(made) == [made] * 2
            move = policy.model.base_model.norm.weight
            if ranks.rank == 1:  # the other rank, whose weights are where they were, makes its graphs anew too
                move.data = move.data.clone()
            before = len(made)
            decode(policy, asked()[:3], case.how)
            assert len(made) > before
            leave()
            assert len(engine.graphs) == 0, "NCCL does not leave a group that a graph uses"


def fail_to_capture(_: Graphs, work: Callable[[], torch.Tensor]) -> None:
    work()  # what is captured is computed once before
    raise RuntimeError("capture is not permitted")


@pytest.mark.nightly
@pytest.mark.parametrize("fails_on", [None, 1])
def test_compiled_layers_and_graphs_draw_the_same(fails_on: int | None, tiny_model: Model) -> None:
    on_ranks(2, sample_in_graphs, cases(tiny_model("qwen3_tied"), PLAIN), fails_on)


@pytest.mark.long
def test_beside_shards(tiny_model: Model) -> None:
    """Two teams of two tensor ranks share the requests, and the slices of the weights that each team gathers."""
    on_ranks(4, sample, [*cases(tiny_model("gemma2"), PLAIN), *cases(tiny_model("qwen3_tied"), CUT)], {"tensor": 2})


@pytest.mark.long
def test_key_heads_that_ranks_do_not_divide(tmp_path: Path) -> None:
    """Fewer of them than ranks, or shared unevenly by a rank's query heads; transformers' own attention knows it."""
    uneven = {"hidden_size": 24, "num_attention_heads": 12, "num_key_value_heads": 3, "head_dim": 8}
    given = [
        *cases(make_model(tmp_path / "uneven", "llama", **uneven), PLAIN, BATCHES),
        *cases(make_model(tmp_path / "one", "qwen2", num_key_value_heads=1, vocab_size=62), CUT),
    ]
    on_ranks(4, sample, given, {"tensor": 4})


def survive(model: Path, expected: list[Completion]) -> None:
    """A cache that the last rank's memory makes too small for all; two completions are not wanted any more."""
    ranks = joined(tensor=2)
    policy = load_policy(model, ranks=ranks)
    engine = engine_of(policy)
    assert isinstance(engine, Engine), engine
    each = sum(layer.numbers for layer in engine.layers) * 4 * engine.device.page_size
    with engine.session(policy, Limits(6, 35, cache_bytes=(9 if ranks.first else 5) * each)) as session:
        for number, request in enumerate(asked()):
            session.submit(number, request.request(FULL))
        done = dict(session.step())
        for number in {2, 4} - set(done):
            session.cancel(number)
        done |= run(session)
        assert session.counts.pages == 4
        assert session.counts.preemptions > 0
    assert set(range(10)) - set(done) == {2, 4}
    for number, completion in done.items():
        same(completion, expected[number])


def test_a_full_cache_is_survived_and_completions_are_cancelled(tiny_model: Model) -> None:
    (case,) = cases(tiny_model("gemma2"), FULL)
    on_ranks(2, survive, case.model, case.expected)


def draw_otherwise(model: Path, how: How) -> None:
    """The last rank draws another token for one row of the fifth step."""
    ranks = joined(tensor=2)
    policy = load_policy(model, ranks=ranks)
    engine = engine_of(policy)
    assert isinstance(engine, Engine), engine
    honest, calls = engine.device.draw, []

    def planted(*arguments: Any) -> Any:
        drawn = honest(*arguments)
        calls.append(drawn)
        if len(calls) == 5 and not ranks.first:
            drawn.tokens[1] = (drawn.tokens[1] + 1) % policy.vocabulary_size
        return drawn

    engine.device.draw = plain_module.draw = planted
    with pytest.raises(DisagreementError, match=r"parallel\.tensor: .* drew different tokens"):
        decode(policy, asked(), how)
    assert len(calls) == 5


@pytest.mark.parametrize("how", long_except([FULL, BATCHES], FULL))
def test_ranks_that_draw_different_tokens_are_found_out(how: How, tiny_model: Model) -> None:
    """On every rank, at the step in which it happens."""
    on_ranks(2, draw_otherwise, tiny_model("llama"), how)


def sample_after_an_error(given: Case, parallel: dict[str, int], fails_on: set[int]) -> None:
    """A step of the engine fails, while rank 0 waits in a round that rank 1 has not begun."""
    ranks = joined(**parallel)
    policy = load_policy(given.model, ranks=ranks)
    honest_step, honest_gather = Phase.step, Ranks.gather
    left = 0  # steps until one fails

    def step(phase: Phase, *arguments: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0 and ranks.rank in fails_on:
            raise ZeroDivisionError("planted")
        return honest_step(phase, *arguments)

    def gather(self: Ranks, value: Any, ahead: bool = False, sampling: bool = False) -> Any:
        if sampling and not ranks.first and left > 0:
            time.sleep(0.1)
        return honest_gather(self, value, ahead, sampling)

    Phase.step, Ranks.gather = step, gather  # type: ignore[method-assign, assignment]
    for _ in range(3):
        left = 3
        with pytest.raises(ZeroDivisionError, match="planted"):
            decode(policy, asked(), given.how)
        for mine, theirs in zip(decode(policy, asked(), given.how), given.expected, strict=True):
            same(mine, theirs)


@pytest.mark.parametrize(
    ("parallel", "fails_on"), [({"tensor": 2}, {0, 1}), ({"data_shard": 2}, {0}), ({"data_shard": 2}, {1})]
)
def test_after_an_error_ranks_sample_again(parallel: dict[str, int], fails_on: set[int], tiny_model: Model) -> None:
    """Every rank gets the error, and no rank is left in a round that others do not take part in."""
    (case,) = cases(tiny_model("llama"), PLAIN)
    on_ranks(2, sample_after_an_error, case, parallel, fails_on)


def lack_an_engine(model: Path, expected: list[Completion]) -> None:
    """The last rank alone finds that the engine does not serve the model."""
    ranks = joined(tensor=2)
    policy = load_policy(model, ranks=ranks)
    honest = engine_module.probe_plainly

    def planted(*arguments: Any) -> None:
        honest(*arguments)
        if not ranks.first:
            raise UnservedError("planted")

    engine_module.probe_plainly = planted
    for mine, theirs in zip(decode(policy, asked(), PLAIN), expected, strict=True):
        same(mine, theirs)
    assert engine_of(policy) == ("another tensor rank has no engine" if ranks.first else "planted")


@pytest.mark.long
def test_where_one_rank_has_no_engine_none_uses_it(tiny_model: Model) -> None:
    (case,) = cases(tiny_model("llama"), PLAIN)
    on_ranks(2, lack_an_engine, case.model, case.expected)


def fail_alone(model: Path) -> None:
    """The first rank alone has an error, in the middle of sampling."""
    ranks = joined(tensor=2)
    watch = Watch(ranks, 60)
    with watch.watching():
        policy = load_policy(model, ranks=ranks)

        def told(number: int, completion: Completion) -> None:
            raise ZeroDivisionError("planted")

        decode(policy, asked(), FULL, told if ranks.first else None)


@pytest.mark.long
def test_an_error_of_one_rank_ends_the_others(tiny_model: Model) -> None:
    """They get it in the next round and raise it too."""
    with pytest.raises(
        RankError, match="(?s)rank 0: .*ZeroDivisionError: planted.*rank 1: .*ZeroDivisionError: planted"
    ):
        on_ranks(2, fail_alone, tiny_model("llama"))


class NeverRates(DirectRater):
    def submit(self, prompt: Prompt, completion: str, seed: str) -> Future[Rating]:
        return Future()


def rate_and_be_stopped(model: Path) -> None:
    """Both ranks get all rewards. Then one is asked to stop while its rewards are computed, and both know."""
    ranks = joined(tensor=2)
    policy = load_policy(model, ranks=ranks)
    prompts = [Prompt(str(number), "w1", {}, each.input_ids) for number, each in enumerate(asked())]
    draw, generator = PLAIN.draw, EngineGenerator(policy, PLAIN.settings)

    def evaluate(rater: DirectRater, asked_to_stop: Callable[[], bool]) -> dict[str, Any]:
        plays = SingleTurn(rater, reader(policy))
        evaluator = Evaluator(generator, prompts, plays, draw, samples_per_prompt=2, seed=1, examples=10)
        return evaluator.run(0, 0, asked_to_stop)

    line = evaluate(DirectRater(letter_reward), never)
    assert [each["reward"] for each in line["examples"]] == [
        letter_reward("", each["completion"]) for each in line["examples"]
    ]
    assert len(line["examples"]) == len(prompts)
    assert ranks.gather(line["examples"]) == [line["examples"]] * 2
    rater = DirectRater(letter_reward) if ranks.first else NeverRates(letter_reward)
    with pytest.raises(Interrupted):
        evaluate(rater, lambda: not ranks.first)


def test_rewards_are_computed_once_and_a_stop_reaches_every_rank(tmp_path: Path) -> None:
    on_ranks(2, rate_and_be_stopped, tokenised_model(tmp_path / "model", "llama"))


def run_of(size: int, tmp_path: Path, reward: str = "digit_reward", **parallel: int) -> Path:
    """Train with sampling and evaluation. One group of each step is replaced if all of its rewards are alike."""
    prompts = write_lines(tmp_path / "prompts.jsonl", sort_prompts(5))
    given = config(word_model(tmp_path / "model"), "unused", tmp_path / f"on{size}", checkpoint={"every": 0})
    given["data"] = {"group_size": 4, "tokens_per_microbatch": 64, "zero_advantage": "replace", "replace_limit": 1}
    given["sampler"] = {"prompts": str(prompts), "reward": f"plain_rewards:{reward}", "max_new_tokens": 6}
    given["evaluation"] = {"prompts": str(prompts), "every": 2}
    given["schedule"] = {"docs_per_step": 8, "steps": 2, "stall_timeout": 30}
    given |= {"parallel": parallel, "seed": 1}
    on_ranks(size, train_all, [given])
    return tmp_path / f"on{size}"


@pytest.mark.parametrize("size", long_except([2, 4], 2))
def test_a_run_that_samples_and_evaluates_is_that_of_one_process(size: int, tmp_path: Path) -> None:
    """Also as two teams of two. Every update is on fresh documents, whose ratio is 1."""
    mine, theirs = run_of(size, tmp_path, tensor=2), run_of(1, tmp_path)
    check_same_run(mine, theirs)
    for line in read_lines(mine / "metrics.jsonl"):
        assert line["ratio_new_old"] == pytest.approx(1, abs=1e-5)
    evaluated = [without_times(read_lines(run / "evaluation.jsonl")) for run in (mine, theirs)]
    assert evaluated[0] == evaluated[1] and evaluated[0]


@pytest.mark.long
def test_over_ranks_groups_are_trained_on_and_replaced_in_their_order(tmp_path: Path) -> None:
    lines = read_lines(run_of(2, tmp_path, "one_reward") / "ledger.jsonl")
    trained = [list(dict.fromkeys(name.split("-")[0] for name in line["documents"])) for line in lines]
    aside = [sorted({one["id"].split("-")[0] for one in line["put_aside"]}) for line in lines]
    assert trained == [["1", "2"], ["4", "5"]] and aside == [["0"], ["3"]]


def share_unevenly(model: Path, expected: list[Completion]) -> None:
    """Two rows a rank. What is meant for one rank is long, and what is meant for the other is short."""
    ranks = joined(data_shard=2)
    policy = load_policy(model, ranks=ranks)
    generator = EngineGenerator(policy, EngineSettings(rows=2))
    drawn_before = progress.amounts().get("tokens", 0)
    own: list[int] = []

    async def work(item: tuple[int, Asked], generate: Generate) -> Completion:
        own.append(item[0])
        return await generate(item[1].request(UNEVEN))

    found = generator.map(list(enumerate(uneven())), work)
    for mine, theirs in zip(found, expected, strict=True):
        same(mine, theirs)
    assert sorted(number for part in ranks.gather(own) for number in part) == list(range(len(found)))
    drawn = ranks.gather(progress.amounts()["tokens"] - drawn_before)
    total = sum(len(completion.token_ids) for completion in found)
    assert sum(drawn) == total
    assert max(drawn) < 0.7 * total, drawn

    async def fail(number: int, generate: Generate) -> None:
        if number == 3:
            raise ZeroDivisionError("planted")
        await generate(uneven()[number].request(UNEVEN))

    with pytest.raises(ZeroDivisionError, match="planted"):  # on every rank
        generator.map(range(6), fail)
    assert len(generator.map(list(enumerate(uneven()[:3])), work)) == 3, "and both go on"


UNEVEN = options(max_new_tokens=40, stop_ids=frozenset(range(0, 64, 12)))


def uneven() -> list[Asked]:
    return requests((5,) * 24)


def test_a_rank_that_has_nothing_left_takes_requests_of_another(tiny_model: Model) -> None:
    model = tiny_model("llama")
    expected = decode(load_policy(model), uneven(), UNEVEN)
    assert len({len(completion.token_ids) for completion in expected}) > 5
    on_ranks(2, share_unevenly, model, expected)
