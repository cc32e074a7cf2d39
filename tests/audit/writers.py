"""Writes rollouts as each trainer dumps them, by the code or the documentation that docs/audit.md names."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from audit.world import END, Rollout

Change = Callable[[dict[str, Any], int], None]  # changes a record before it is written


def words(ids: Iterable[int]) -> str:
    return " ".join(f"w{token}" for token in ids)


def lines(path: Path, records: Iterable[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def spread(one: Rollout, values: Sequence[float]) -> list[float]:
    return [0.0] * len(one.prompt) + list(values)


def truestep(rollouts: Sequence[Rollout], folder: Path, change: Change | None = None) -> list[Path]:
    records = []
    for index, one in enumerate(rollouts):
        record = {
            "id": f"{index}",
            "input_ids": one.ids,
            "loss_mask": one.mask,
            "logprobs": spread(one, one.logprobs),
            "reward": one.reward,
            "rewards": one.parts,
            "advantage": one.advantage,
            "group_id": f"g{one.group}",
            "step": one.step,
            "model_version": one.version,
            "truncated": one.truncated,
            "temperature": one.temperature,
            "routed_experts": None if one.routes is None else one.routes.tolist(),
        }
        if change:
            change(record, index)
        records.append(record)
    return [lines(folder / "rollouts.jsonl", records)]


def prime_rl(rollouts: Sequence[Rollout], folder: Path, change: Change | None = None) -> list[Path]:
    steps: dict[int, list[dict[str, Any]]] = {}
    for index, one in enumerate(rollouts):
        listed = steps.setdefault(one.step, [])
        ratio = np.array(spread(one, one.trainer)) - np.array(spread(one, one.logprobs))
        record = {
            "schema_version": 1, "step": one.step, "export_step": one.step, "rank": 0, "micro_step": 0,
            "micro_sequence_idx": len(listed), "export_sequence_idx": len(listed), "run_id": None, "env_name": "env",
            "token_ids": one.ids, "position_ids": list(range(len(one.ids))), "loss_mask": [bool(m) for m in one.mask],
            "advantages": spread(one, [one.advantage] * len(one.drawn)),
            "losses": [{"rl": {"advantage": one.advantage, "mask": bool(m)}} for m in one.mask],
            "rewards": [one.reward] * len(one.ids), "inference_logprobs": spread(one, one.logprobs),
            "trainer_logprobs": [-3.0] * len(one.prompt) + one.trainer,
            "entropy": [1.0] * len(one.prompt) + one.entropy,
            "mismatch_kl": (np.expm1(ratio) - ratio).tolist(), "log_importance_ratio": ratio.tolist(),
            "importance_ratio": np.exp(ratio).tolist(), "prob_delta": [0.0] * len(one.ids),
            "is_masked": [False] * len(one.ids), "is_masked_high": [False] * len(one.ids),
            "is_masked_low": [False] * len(one.ids),
        }  # fmt: skip
        if change:
            change(record, index)
        listed.append(record)
    return [lines(folder / f"token_exports/step_{step}/rank_0.jsonl", records) for step, records in steps.items()]


def slime(rollouts: Sequence[Rollout], folder: Path, change: Change | None = None) -> list[Path]:
    import torch

    written = []
    for step in sorted({one.step for one in rollouts}):
        chosen = [one for one in rollouts if one.step == step]
        data: dict[str, Any] = {
            "tokens": [torch.tensor(one.ids) for one in chosen],
            "response_lengths": [len(one.drawn) for one in chosen],
            "total_lengths": [len(one.ids) for one in chosen],
            "loss_masks": [torch.tensor(one.mask[len(one.prompt) :], dtype=torch.int) for one in chosen],
            "rewards": [one.advantage for one in chosen],
            "raw_reward": [one.reward for one in chosen],
            "truncated": [int(one.truncated) for one in chosen],
            "sample_indices": list(range(len(chosen))),
            "weight_versions": [[str(one.version)] for one in chosen],
            "rollout_log_probs": [torch.tensor(one.logprobs) for one in chosen],
            "log_probs": [torch.tensor(one.trainer) for one in chosen],
            "advantages": [torch.full((len(one.drawn),), one.advantage) for one in chosen],
            "rollout_routed_experts": [one.routes.astype(np.int32) for one in chosen],
        }
        if change:
            change(data, step)
        path = folder / f"train_{step}_0.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"rollout_id": step, "rank": 0, "rollout_data": data}, path)
        written.append(path)
    return written


def verl(rollouts: Sequence[Rollout], folder: Path, change: Change | None = None) -> list[Path]:
    steps: dict[int, list[dict[str, Any]]] = {}
    for index, one in enumerate(rollouts):
        record = {"input": words(one.prompt), "output": words(one.drawn), "gts": f"w{one.answer}", "score": one.reward,
                  "step": one.step, "acc": one.parts["right"]}  # fmt: skip
        if change:
            change(record, index)
        steps.setdefault(one.step, []).append(record)
    return [lines(folder / f"{step}.jsonl", records) for step, records in steps.items()]


def trl(rollouts: Sequence[Rollout], folder: Path, change: Change | None = None) -> list[Path]:
    import pyarrow as arrow
    from pyarrow import parquet

    steps: dict[int, list[dict[str, Any]]] = {}
    for index, one in enumerate(rollouts):
        record = {"step": one.step, "prompt": words(one.prompt), "completion": words(one.drawn),
                  "right": one.parts["right"], "short": one.parts["short"], "advantage": one.advantage}  # fmt: skip
        if change:
            change(record, index)
        steps.setdefault(one.step, []).append(record)
    folder.mkdir(parents=True, exist_ok=True)
    for step, records in steps.items():
        parquet.write_table(arrow.Table.from_pylist(records), folder / f"completions_{step:05}.parquet")
    return sorted(folder.glob("*.parquet"))


def conversations(rollouts: Sequence[Rollout]) -> list[list[tuple[list[int], list[int], list[float]]]]:
    """Cut each rollout into turns of a conversation: (prompt, drawn, log-probs), with answers of an environment."""
    found = []
    for one in rollouts:
        past, turns = list(one.prompt), []
        for start in range(0, len(one.drawn), 12):
            drawn, logs = one.drawn[start : start + 12], one.logprobs[start : start + 12]
            turns.append((list(past), drawn, logs))
            past += [*drawn, 60, 61, 62, (start + one.group) % VOCABULARY_OF_ANSWERS]
        found.append(turns)
    return found


VOCABULARY_OF_ANSWERS = 50


def tinker(rollouts: Sequence[Rollout], folder: Path, change: Change | None = None) -> list[Path]:
    steps: dict[int, list[dict[str, Any]]] = {}
    for index, (one, turns) in enumerate(zip(rollouts, conversations(rollouts), strict=True)):
        record = {
            "schema_version": 1, "split": "train", "iteration": one.step, "group_idx": one.group, "traj_idx": index,
            "tags": ["test"], "sampling_client_step": one.version, "total_reward": one.reward,
            "final_reward": one.parts["right"], "trajectory_metrics": {}, "final_ob_len": len(one.ids),
            "steps": [
                {"step_idx": n, "ob_len": len(prompt), "ac_len": len(drawn),
                 "reward": one.parts["short"] if n == len(turns) - 1 else 0.0, "episode_done": n == len(turns) - 1,
                 "stop_reason": "stop", "metrics": {}, "logs": {}}
                for n, (prompt, drawn, _) in enumerate(turns)
            ],
        }  # fmt: skip
        if change:
            change(record, index)
        steps.setdefault(one.step, []).append(record)
    return [
        lines(folder / f"train_iteration_{step:06}_rollout_summaries.jsonl", records) for step, records in steps.items()
    ]


def openai(rollouts: Sequence[Rollout], folder: Path, change: Change | None = None) -> list[Path]:
    records = []
    for index, (one, turns) in enumerate(zip(rollouts, conversations(rollouts), strict=True)):
        for n, (prompt, drawn, logs) in enumerate(turns):
            content = [{"token": f"w{token}", "logprob": log} for token, log in zip(drawn, logs, strict=True)]
            reason = "stop" if drawn[-1] == END else "length"
            record = {
                "conversation_id": f"c{index}",
                "request": {"temperature": one.temperature, "messages": [{"role": "user", "content": words(prompt)}]},
                "response": {
                    "id": f"{index}-{n}", "object": "chat.completion", "prompt_token_ids": prompt,
                    "choices": [{"index": 0, "finish_reason": reason, "token_ids": list(drawn),
                                 "message": {"role": "assistant", "content": words(drawn)},
                                 "logprobs": {"content": content}}],
                },
            }  # fmt: skip
            if change:
                change(record, n)
            records.append(record)
    return [lines(folder / "transcripts.jsonl", records)]


WRITERS = {
    "truestep": truestep,
    "prime-rl": prime_rl,
    "slime": slime,
    "miles": slime,
    "verl": verl,
    "trl": trl,
    "tinker": tinker,
    "openai": openai,
}
