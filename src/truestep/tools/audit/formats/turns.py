"""Conversations with one sample per turn: tinker-cookbook's rollout summaries, and transcripts of OpenAI's API."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from truestep.tools.audit.formats.arrays import Fit, array, number, score, text, whole
from truestep.tools.audit.opening import UnreadableError
from truestep.tools.audit.samples import Sample


def fits_tinker(record: Mapping[str, Any]) -> bool:
    return {"group_idx", "traj_idx", "steps"} <= set(record)


def samples_of_tinker(record: Mapping[str, Any], file: str, line: int) -> Iterator[Sample]:
    """Read a trajectory. Summaries have only lengths; steps with `ob` and `ac`, the library's own names, also have
    tokens."""
    steps = record["steps"]
    if not isinstance(steps, list) or not all(isinstance(step, Mapping) for step in steps):
        raise UnreadableError(f"{file}:{line}: steps is no list of objects")
    iteration, sampled = whole(record.get("iteration")), whole(record.get("sampling_client_step"))
    rewards = [number(step.get("reward")) or 0.0 for step in steps]
    final, total = number(record.get("final_reward")), number(record.get("total_reward"))
    for index, step in enumerate(steps):
        action = mapping(step.get("ac"))
        drawn = array(action.get("tokens"), "ac.tokens", np.int64)
        last = index == len(steps) - 1
        stop = text(step.get("stop_reason"))
        yield turn(
            tokens_of(step.get("ob")),
            drawn,
            array(action.get("maybe_logprobs"), "ac.maybe_logprobs"),
            file=file,
            line=line,
            id=f"{record['group_idx']}/{record['traj_idx']}/{index}",
            reward=total if last else None,
            parts={"final_reward": final, "steps": sum(rewards)} if last and final is not None else {},
            group=text(record["group_idx"]) if last else None,
            step=iteration,
            version=sampled,
            staleness=None if iteration is None or sampled is None else iteration - sampled,
            truncated=None if stop is None else stop == "length",
            conversation=f"{iteration}/{record['group_idx']}/{record['traj_idx']}",
            lengths=(whole(step.get("ob_len")) or 0, whole(step.get("ac_len")) or 0),
        )


def mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def tokens_of(observation: Any) -> np.ndarray | None:
    """Return the tokens of a tinker.ModelInput, which has them in chunks, or of a plain list."""
    if isinstance(observation, Mapping):
        chunks = observation.get("chunks")
        lists = [chunk.get("tokens") for chunk in chunks if isinstance(chunk, Mapping)] if chunks else []
        observation = [token for tokens in lists if isinstance(tokens, list) for token in tokens]
    return array(observation, "ob", np.int64)


def turn(prompt: np.ndarray | None, drawn: np.ndarray | None, logprobs: np.ndarray | None, /, **rest: Any) -> Sample:
    """Make a sample from a prompt and the tokens drawn after it."""
    if prompt is None or drawn is None:
        return Sample(**rest)
    ids = np.concatenate([prompt, drawn])
    fit = Fit(len(ids))
    spread = fit.tail(logprobs, "logprobs", len(drawn))
    mask = np.arange(len(ids)) >= len(prompt)
    return Sample(ids=ids, mask=mask, logprobs=spread, misfits=tuple(fit.misfits), **rest)


_NAMES = ("conversation_id", "session_id", "document_id")


def fits_openai(record: Mapping[str, Any]) -> bool:
    answer = record.get("response", record)
    return isinstance(answer, Mapping) and isinstance(answer.get("choices"), list)


def samples_of_openai(record: Mapping[str, Any], file: str, line: int) -> Iterator[Sample]:
    """Read a response of chat completions or completions, alone or together with its `request`. Token ids and log-probs
    are read from the fields that vLLM and SGLang use."""
    answer = record.get("response", record)
    request = mapping(record.get("request"))
    asked = request if request else record
    name = next((text(record[key]) for key in _NAMES if record.get(key) is not None), None)
    for index, choice in enumerate(answer["choices"]):
        if not isinstance(choice, Mapping):
            raise UnreadableError(f"{file}:{line}: choices[{index}] is no object")
        listed = choice.get("prompt_token_ids") or answer.get("prompt_token_ids")
        message = mapping(choice.get("message"))
        drawn, logprobs = _drawn(choice)
        yield turn(
            array(listed, "prompt_token_ids", np.int64),
            drawn,
            logprobs,
            file=file,
            line=line,
            id=text(answer.get("id")) or "",
            reward=score(record.get("reward")),
            group=text(record.get("group_id")),
            step=whole(record.get("step")),
            truncated=choice.get("finish_reason") == "length",
            temperature=number(request.get("temperature")),
            prompt=text(asked.get("messages")) or text(asked.get("prompt")),
            completion=text(message.get("content")) or text(choice.get("text")),
            conversation=name or f"{file}:{line}/{index}",
        )


def _drawn(choice: Mapping[str, Any]) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Return the ids and the log-probs of the drawn tokens."""
    found = mapping(choice.get("logprobs"))
    content = found.get("content")
    items = [item for item in content if isinstance(item, Mapping)] if isinstance(content, list) else None
    logprobs = found.get("token_logprobs") if items is None else [item.get("logprob") for item in items]
    ids = choice.get("token_ids")
    if ids is None and items:  # the format of vLLM's --return-tokens-as-token-ids
        ids = [whole(str(item.get("token", "")).removeprefix("token_id:")) for item in items]
        ids = None if None in ids else ids
    return array(ids, "token_ids", np.int64), array(logprobs, "logprobs")
