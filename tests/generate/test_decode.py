"""Decoding against transformers' own generation, against truestep's own packed forward, and against exact
distributions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from completing import Asked, Completion, How, decode
from selection import long_except
from tiny import KINDS, VOCABULARY, make_model
from truestep.head.logits import HeadSettings
from truestep.losses.label_losses import CrossEntropy
from truestep.losses.objective import Denominator, Objective
from truestep.model.loading.load import load_policy
from truestep.model.mixers import attention
from truestep.model.policy import Policy
from truestep.step.compute.runner import StepRunner
from truestep.step.plan.plan import make_plan
from truestep.types import Rollout

Model = Callable[[str], Path]
LENGTHS = (3, 17, 1, 9, 12)
NEW = 12  # with a sliding window of 5, most of what is decoded has left its prompt's window


def options(**changes: Any) -> How:
    usual = {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": NEW, "batch_size": 64, "stop_ids": frozenset()}
    return How(**(usual | changes))


def requests(lengths: Sequence[int] = LENGTHS) -> list[Asked]:
    generator = np.random.default_rng(3)
    return [
        Asked(tuple(generator.integers(0, VOCABULARY, length).tolist()), (7, number))
        for number, length in enumerate(lengths)
    ]


def tokens_of(completions: Sequence[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


def packed_logprobs(
    policy: Policy, asked: Sequence[Asked], answers: Sequence[Completion], temperature: float
) -> list[np.ndarray]:
    """Of the completions' tokens, by the forward pass and the head that training uses, all documents in one pack."""
    rollouts = []
    for number, (request, answer) in enumerate(zip(asked, answers, strict=True)):
        ids = np.array([*request.input_ids, *answer.token_ids])
        mask = np.arange(len(ids)) >= len(request.input_ids)
        rollouts.append(Rollout(str(number), ids, mask, temperature=temperature))
    runner = StepRunner(policy, Objective(CrossEntropy(), Denominator("labels", None)), keep_scores=True)
    plan = make_plan(rollouts, [range(len(rollouts))], 0)
    return [score.logprobs for score in runner.accumulate(plan, backward=False).scores]


@contextmanager
def batch_sizes(policy: Policy) -> Iterator[list[int]]:
    """How many tokens each forward pass of the model had, once the engine has looked at the model."""
    decode(policy, requests((1,)), options(max_new_tokens=1))
    sizes: list[int] = []
    hook = policy.model.base_model.register_forward_hook(
        lambda module, given, output: sizes.append(output.last_hidden_state.shape[:2].numel())
    )
    yield sizes
    hook.remove()


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_is_what_transformers_generates(kind: str, tiny_model: Model) -> None:
    asked = requests()
    greedy = options(temperature=0.0)
    together = decode(load_policy(tiny_model(kind)), asked, greedy)
    reference = AutoModelForCausalLM.from_pretrained(tiny_model(kind), dtype=torch.float32)
    reference.generation_config.eos_token_id = None
    for request, completion in zip(asked, together, strict=True):
        prompt = torch.tensor([request.input_ids])  # alone, so without any padding
        expected = reference.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW, do_sample=False, pad_token_id=0
        )
        assert completion.token_ids == expected[0, prompt.shape[1] :].tolist()
        assert not completion.stopped


@pytest.mark.parametrize(
    ("kind", "temperature", "top_p"),
    [("llama", 0.7, 1.0), ("gemma2", 1.3, 0.8), ("mistral", 0.7, 0.8), ("qwen3_tied", 1.3, 1.0), ("granite", 0.7, 1.0)],
)
def test_logprobs_are_those_of_training(kind: str, temperature: float, top_p: float, tiny_model: Model) -> None:
    policy = load_policy(tiny_model(kind), head=HeadSettings(fp32=True))
    asked = requests()
    completions = decode(policy, asked, options(temperature=temperature, top_p=top_p))
    for answer, expected in zip(completions, packed_logprobs(policy, asked, completions, temperature), strict=True):
        assert len(answer.logprobs) == NEW
        np.testing.assert_allclose(answer.logprobs, expected, rtol=0, atol=1e-5)


def test_logprobs_are_of_the_whole_distribution_in_float64(tiny_model: Model) -> None:
    """By transformers' own logits; a distribution cut by top_p would give each token more."""
    policy = load_policy(tiny_model("llama"))
    reference = AutoModelForCausalLM.from_pretrained(tiny_model("llama"), dtype=torch.float64)
    asked = requests()
    for request, answer in zip(asked, decode(policy, asked, options(temperature=0.7, top_p=0.3)), strict=True):
        text = torch.tensor([[*request.input_ids, *answer.token_ids]])
        with torch.no_grad():
            log_p = (reference(text).logits[0, len(request.input_ids) - 1 : -1] / 0.7).log_softmax(-1)
        expected = log_p.gather(-1, torch.tensor(answer.token_ids)[:, None]).squeeze(-1)
        np.testing.assert_allclose(answer.logprobs, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2"])
def test_draws_depend_on_neither_batch_size_nor_company(kind: str, tiny_model: Model) -> None:
    policy = load_policy(tiny_model(kind))
    asked = requests((3, 17, 1, 9, 12, 12, 4))
    stops = options(top_p=0.9, stop_ids=frozenset(range(5)))
    usual = decode(policy, asked, stops)
    assert len({len(completion.token_ids) for completion in usual}) > 1, "rows must end at different times"
    for size in (1, 2, 3):
        other = decode(policy, asked, options(top_p=0.9, stop_ids=frozenset(range(5)), batch_size=size))
        assert tokens_of(other) == tokens_of(usual)
        for mine, theirs in zip(other, usual, strict=True):
            np.testing.assert_allclose(mine.logprobs, theirs.logprobs, rtol=0, atol=1e-5)
    assert tokens_of(decode(policy, asked[::-1], stops)) == tokens_of(usual)[::-1]
    assert tokens_of(decode(policy, asked[1:2], stops)) == tokens_of(usual)[1:2]


def test_the_same_prompt_is_answered_by_its_seed_alone(tiny_model: Model) -> None:
    policy = load_policy(tiny_model("qwen3"))
    prompt = requests((6,))[0].input_ids
    asked = [Asked(prompt, (1, 0)), Asked(prompt, (1, 1)), Asked(prompt, (1, 0))]
    first, other, again = tokens_of(decode(policy, asked, options()))
    assert first == again
    assert first != other


def test_no_requests_are_no_completions(tiny_model: Model) -> None:
    assert decode(load_policy(tiny_model("llama")), [], options()) == []


def test_a_stop_token_ends_a_completion_and_is_part_of_it(tiny_model: Model) -> None:
    policy = load_policy(tiny_model("qwen2"))
    asked = requests((3, 17, 1, 9, 12, 5, 5, 8))
    endless = decode(policy, asked, options(max_new_tokens=20))
    stop_ids = frozenset(range(0, VOCABULARY, 6))
    with batch_sizes(policy) as sizes:
        stopped = decode(policy, asked, options(max_new_tokens=20, stop_ids=stop_ids))
    ends = []
    for whole, cut in zip(endless, stopped, strict=True):
        end = next((at + 1 for at, token in enumerate(whole.token_ids) if token in stop_ids), None)
        assert cut.token_ids == whole.token_ids[:end]
        assert cut.stopped == (end is not None)
        np.testing.assert_allclose(cut.logprobs, whole.logprobs[:end], rtol=0, atol=1e-5)
        ends.append(end or 20)
    assert len(set(ends)) > 3
    # Prompts first; then one token of each row that still runs, and nothing else.
    prompts = sum(len(request.input_ids) for request in asked)
    assert sizes == [prompts, *(sum(end > number for end in ends) for number in range(1, max(ends)))]


@pytest.mark.parametrize("length", [1, 5])
def test_the_length_ends_what_no_stop_token_does(length: int, tiny_model: Model) -> None:
    policy = load_policy(tiny_model("llama"))
    short = decode(policy, requests(), options(max_new_tokens=length))
    long = decode(policy, requests(), options(max_new_tokens=NEW))
    assert tokens_of(short) == [tokens[:length] for tokens in tokens_of(long)]
    assert not any(completion.stopped for completion in short)


def test_a_stop_token_at_the_last_place_counts_as_a_stop(tiny_model: Model) -> None:
    policy = load_policy(tiny_model("llama"))
    last = decode(policy, requests((4,)), options(max_new_tokens=1))[0].token_ids[0]
    stopped = decode(policy, requests((4,)), options(max_new_tokens=1, stop_ids=frozenset([last])))[0]
    assert stopped.stopped
    assert stopped.token_ids == [last]


def nucleus(p: np.ndarray, top_p: float) -> np.ndarray:
    """The distribution that is drawn from: likeliest tokens until they reach top_p, the one that crosses it too."""
    kept, reached = np.zeros_like(p), 0.0
    for token in np.argsort(-p):
        if reached >= top_p:
            break
        kept[token] = p[token]
        reached += p[token]
    return kept / kept.sum()


def chi_square_is_plausible(observed: np.ndarray, expected: np.ndarray) -> bool:
    """Within five sigma of the mean of its distribution, cells of few expected draws merged."""
    rare = expected < 8
    counts = np.append(observed[~rare], observed[rare].sum())
    means = np.append(expected[~rare], expected[rare].sum())
    counts, means = counts[means > 0], means[means > 0]
    degrees = len(means) - 1
    return bool(((counts - means) ** 2 / means).sum() < degrees + 5 * (2 * degrees) ** 0.5)


@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.7])
@pytest.mark.parametrize("temperature", long_except([0.7, 1.3], 1.3))
def test_two_tokens_are_drawn_from_their_joint_distribution(temperature: float, top_p: float, tmp_path: Path) -> None:
    vocabulary, draws = 7, 8000
    directory = make_model(tmp_path / "model", "llama", vocab_size=vocabulary, pad_token_id=None)
    prompt = (3, 1, 4)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
    with torch.no_grad():
        texts = torch.tensor([[*prompt, token] for token in range(vocabulary)])
        p = (model(texts).logits[:, -2:] / temperature).softmax(-1).numpy()
    joint = np.stack([nucleus(p[0, 0], top_p)[token] * nucleus(p[token, 1], top_p) for token in range(vocabulary)])
    assert (joint > 0).sum() > (20 if top_p == 1.0 else 2)
    asked = [Asked(prompt, (11, number)) for number in range(draws)]
    answers = decode(
        load_policy(directory), asked, options(temperature=temperature, top_p=top_p, max_new_tokens=2, batch_size=2000)
    )
    seen = Counter(tuple(answer.token_ids) for answer in answers)
    observed = np.array([[seen[first, second] for second in range(vocabulary)] for first in range(vocabulary)])
    assert not observed[joint == 0].any(), "a token outside of top_p was drawn"
    assert observed[joint * draws > 20].all(), "a token inside of top_p was never drawn"
    assert chi_square_is_plausible(observed.flatten(), joint.flatten() * draws)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
@pytest.mark.parametrize("training", [True, False])
def test_the_policy_is_left_as_it_was_also_by_an_error(kind: str, training: bool, tiny_model: Model) -> None:
    policy = load_policy(tiny_model(kind))
    policy.model.train(training)
    asked = requests()
    decode(policy, asked, options())
    before = packed_logprobs(policy, asked, [Completion([1, 2], [0.0, 0.0], False)] * len(asked), 1.0)
    modes: list[bool] = []

    def fail_late(module: Any, given: Any) -> None:
        modes.append(module.training)
        if len(modes) == 3:
            raise RuntimeError("out of memory")

    hook = policy.model.base_model.register_forward_pre_hook(fail_late)
    with pytest.raises(RuntimeError, match="out of memory"):
        decode(policy, asked, options())
    hook.remove()
    assert modes == [False] * 3
    assert policy.model.training is training
    assert policy.model.config._attn_implementation == attention.NAME
    decode(policy, asked, options())
    assert policy.model.training is training
    assert torch.is_grad_enabled()
    after = packed_logprobs(policy, asked, [Completion([1, 2], [0.0, 0.0], False)] * len(asked), 1.0)
    assert all((mine == theirs).all() for mine, theirs in zip(before, after, strict=True))


def test_activation_checkpointing_changes_no_draw(tiny_model: Model) -> None:
    """transformers forbids a cache in training mode with checkpointing: the answers would be slow, or other ones."""
    plain = decode(load_policy(tiny_model("qwen3")), requests(), options())
    policy = load_policy(tiny_model("qwen3"), activation_checkpointing=True)
    with batch_sizes(policy) as sizes:
        assert tokens_of(decode(policy, requests(), options())) == tokens_of(plain)
    assert len(sizes) == NEW
    assert all(layer.training for layer in policy.model.base_model.layers)  # they recompute again
