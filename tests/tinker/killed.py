"""What is killed: a server, and clients that train and save on it. They send again what got no answer, and write down
what they were told."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import torch

from kill_driver import _kill_at_event, _kill_self
from tinker.house import PROTOBUF, metrics_of, request_of
from truestep.commands import cli
from truestep.commands.session.session import Session
from truestep.commands.tinker import jobs, journal, serving

PASSING = (408, 409, 429, 503)  # with these the client sends a request again


def kill_within(number: int) -> None:
    """Kill this process when a part of the so-many-th record of the journal is written."""
    whole, seen = journal._append, 0

    def part(file: Path, raw: bytes) -> None:
        nonlocal seen
        seen += 1
        if seen == number:
            with file.open("ab", buffering=0) as opened:
                opened.write(raw[: len(raw) * 2 // 3])
            _kill_self()
        whole(file, raw)

    journal._append = part


def run_server(folder: str, port: int, kill: tuple[str, int] | None) -> None:
    """Serve until killed: before so many changes to the files of checkpoints and the journal, within the writing of a
    record, or from outside."""
    jobs._STATE_SECONDS = 0.1
    torch.set_num_threads(1)
    if kill is not None and kill[0] == "event":
        _kill_at_event(kill[1], f"{folder}/checkpoints")
    elif kill is not None:
        kill_within(kill[1])
    said = os.open(f"{folder}/console.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(said, 1)
    os.dup2(said, 2)
    cli.main(["serve", f"{folder}/serve.yaml", "--port", str(port), "--tinker", f"{folder}/checkpoints"])


class Remote:
    def __init__(self, url: str, key: str):
        self._client = httpx.Client(base_url=f"{url}/api/v1/", headers={"x-api-key": key}, timeout=60)
        self.session = self.ask("create_session", {"tags": [], "sdk_version": "0.38.0"})["session_id"]

    def ask(self, path: str, body: Mapping[str, Any] | bytes) -> Any:
        """Send a request until there is an answer."""
        given: Any = {"content": body, "headers": PROTOBUF} if isinstance(body, bytes) else {"json": body}
        end = time.monotonic() + 120
        while True:
            try:
                answer = self._client.post(path, **given)
            except httpx.TransportError:
                answer = None
            if answer is not None and answer.status_code not in PASSING:
                assert answer.status_code == 200, (path, answer.status_code, answer.text)
                return answer.content if "protobuf" in answer.headers["content-type"] else answer.json()
            assert time.monotonic() < end, "there was no answer"
            time.sleep(0.01)

    def result(self, promise: Mapping[str, Any]) -> Any:
        found = self.ask("retrieve_future", {"request_id": promise["request_id"]})
        assert isinstance(found, bytes) or "error" not in found, found
        return found


def data_of(key: str, step: int) -> list[tuple[list[int], dict[str, Any]]]:
    first = 3 + (step * 7 + len(key)) % 5
    weights = [1.0, 0.5, step % 11 / 8]
    return [([first, first + 1, first + 2], {"target_tokens": [first + 1, first + 2, first + 3], "weights": weights})]


def run_client(folder: str, port: int, key: str) -> None:
    """Train until there is a file `stop`, from the last checkpoint that a client of this key was told of."""
    log = Path(folder) / f"{key}.jsonl"
    whole = log.read_text() if log.exists() else ""
    whole = whole[: whole.rfind("\n") + 1]  # one that is killed may write a part of a line
    log.write_text(whole)
    told = [json.loads(line) for line in whole.splitlines()]
    saved = next((line for line in reversed(told) if "path" in line), None)
    remote = Remote(f"http://127.0.0.1:{port}", key)
    about = {"session_id": remote.session, "model_seq_id": 0}
    if saved is None:
        lora = {"rank": 4, "seed": len(key)}
        made = remote.ask("create_model", {**about, "base_model": "model", "lora_config": lora})
    else:
        made = remote.ask("load_weights", {**about, "path": saved["path"], "optimizer": True})
    model = remote.result(made)["model_id"]
    step, seq = 0 if saved is None else saved["step"], 0

    def tell(line: dict[str, Any]) -> None:
        with log.open("a") as file:
            file.write(json.dumps({"step": step, **line}) + "\n")

    while not (Path(folder) / "stop").exists():
        step, seq = step + 1, seq + 2
        first = remote.ask("forward_backward", request_of(model, seq - 1, data_of(key, step), "cross_entropy"))
        second = remote.ask("optim_step", {"model_id": model, "seq_id": seq, "adam_params": {"learning_rate": 0.01}})
        loss = metrics_of(remote.result(first))["loss:sum"]
        tell({"loss": loss, "norm": remote.result(second)["metrics"]["grad_norm"]})
        if step % 3 == 0:
            seq += 1
            promise = remote.ask("save_weights", {"model_id": model, "seq_id": seq, "path": f"step-{step}"})
            tell({"path": remote.result(promise)["path"]})


def run_server_on_a_disk_that_stands_still(folder: str, port: int) -> None:
    """Serve while a client's checkpoint is written without an end."""
    serving._END_SECONDS = 0.2

    def stands_still(*_: Any, **__: Any) -> Any:
        (Path(folder) / "met").touch()
        threading.Event().wait()

    def client() -> None:
        remote = Remote(f"http://127.0.0.1:{port}", "tml-alice")
        about = {"session_id": remote.session, "model_seq_id": 0, "base_model": "model", "lora_config": {"rank": 4}}
        model = remote.result(remote.ask("create_model", about))["model_id"]
        remote.ask("save_weights", {"model_id": model, "seq_id": 1, "path": "one"})

    Session.write = stands_still  # type: ignore[method-assign]
    threading.Thread(target=client, daemon=True).start()
    run_server(folder, port, None)
