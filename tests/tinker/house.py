"""A server of the protocol in this process: requests go through its routes, and jobs are computed when they are asked
for."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from starlette.applications import Starlette
from starlette.testclient import TestClient

from small_runs import tokenised_model
from truestep.commands.tinker import wire
from truestep.commands.tinker.serving import Tinker
from truestep.commands.tinker.tenants import Tenants
from truestep.config.schema import Config
from truestep.run.assemble.policy import join_ranks, make_policy

RECORDED: Mapping[str, Any] = json.loads((Path(__file__).parent / "recorded.json").read_text(encoding="utf-8"))
PROTOBUF = {"content-type": "application/x-protobuf"}


def tenant_of(key: str) -> str:
    """The name of a tenant where no file names them."""
    return Tenants(None).of(key)


def config_of(directory: Path) -> Config:
    model = directory / "model"
    if not model.exists():
        tokenised_model(model, "llama")
    return Config.model_validate(
        {
            "model": {"path": str(model), "dtype": "float32", "device": "cpu"},
            "data": {"path": str(directory / "none.jsonl"), "tokens_per_microbatch": 64},
            "schedule": {"docs_per_step": 4},
            "loss": {"type": "cross_entropy"},
        }
    )


def served_in(directory: Path, checkpoints: Path, keys: Path | None = None) -> House:
    config = config_of(directory)
    tinker = Tinker(checkpoints, keys)
    policy = make_policy(config, join_ranks(config), frozen=True)
    made = tinker.begin(config, policy, 64)
    return House(tinker, TestClient(Starlette(routes=made), raise_server_exceptions=False))


@dataclass
class House:
    tinker: Tinker
    client: TestClient
    key: str = "tml-alice"
    session: str = ""
    seq: int = field(default=0)

    def of(self, key: str) -> House:
        """The same server, for another tenant."""
        return House(self.tinker, self.client, key)

    def post(self, path: str, body: Any = None, *, content: bytes | None = None, **headers: str) -> httpx.Response:
        headers = {"x-api-key": self.key, **headers}
        if content is not None:
            return self.client.post(f"/api/v1/{path}", content=content, headers={**PROTOBUF, **headers})
        return self.client.post(f"/api/v1/{path}", json=body, headers=headers)

    def get(self, path: str, method: str = "GET", **given: Any) -> httpx.Response:
        return self.client.request(method, f"/api/v1/{path}", headers={"x-api-key": self.key}, **given)

    def begin(self) -> str:
        self.session = self.recorded("session")["session_id"]
        return self.session

    def recorded(self, name: str, **changed: Any) -> Any:
        """Send what the client sends, in this house's session; return the answer."""
        answer = self.send(name, **changed)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def send(self, name: str, **changed: Any) -> httpx.Response:
        given = RECORDED[name]
        if "proto" in given:
            return self.post(given["path"], content=self.message(name, **changed))
        text = json.dumps({**given["json"], **changed}).replace("SESSION", self.session)
        return self.post(given["path"], json.loads(text))

    def message(self, name: str, seq: int | None = None, model: str | None = None) -> bytes:
        """The recorded message, with this session's model and a number of its own."""
        raw = base64.b64decode(RECORDED[name]["proto"])
        kept = [(number, value) for number, value in wire.fields_of(raw) if number not in (1, 2)]
        out = wire.bytes_field(1, model or f"{self.session}:train:0") + wire.number_field(2, seq or 1)
        for number, value in kept:
            out += wire.number_field(number, value) if isinstance(value, int) else wire.bytes_field(number, value)
        return out

    def work(self) -> None:
        """Compute all jobs that are ready, and wait until all is written."""
        going = True
        while going:
            while self.tinker.turn():
                pass
            self.settle()
            going = self.tinker.turn()
        self.settle()

    def settle(self) -> None:
        assert self.tinker.state.writes.settle(60), "a write does not end"

    def started_again(self, directory: Path) -> House:
        """A new server on the same checkpoints; this one computes no more."""
        self.settle()
        assert self.tinker.state.journal is not None
        self.tinker.state.journal.close()
        made = served_in(directory, self.tinker.directory, self.tinker.keys)
        return replace(made, key=self.key, session=self.session)

    def clear(self) -> None:
        """Remove all checkpoints."""
        for folder in self.tinker.directory.iterdir():
            if folder.name != "live":
                shutil.rmtree(folder, ignore_errors=True)

    def result(self, promise: Mapping[str, Any]) -> Any:
        """The result of a future: JSON, or the fields of a message."""
        self.work()
        answer = self.post("retrieve_future", {"request_id": promise["request_id"]})
        assert answer.status_code == 200, answer.text
        if "protobuf" in answer.headers["content-type"]:
            return answer.content
        return answer.json()

    def make(self) -> str:
        """A session with a model of the recorded request."""
        self.begin()
        return str(self.result(self.recorded("model"))["model_id"])


def arrays_of(message: bytes) -> list[dict[str, np.ndarray]]:
    """The outputs of each datum of a ForwardBackwardOutput."""
    found: list[dict[str, np.ndarray]] = []
    for number, record in wire.fields_of(message):
        if number != 2:
            continue
        parts = list(wire.fields_of(record))
        own: list[dict[str, np.ndarray]] = [{} for _ in range(next(value for key, value in parts if key == 3))]
        for _, entry in (part for part in parts if part[0] == 2):
            pair = dict(wire.fields_of(entry))
            batched = dict(wire.fields_of(pair[2]))
            offsets = np.frombuffer(batched[2], "<i8")
            sides = list(batched.get(4, b""))
            for each, first, last in zip(own, offsets, offsets[1:], strict=False):
                each[pair[1].decode()] = np.frombuffer(batched[1][first:last], "<f4").reshape(-1, *sides)
        found += own
    return found


def metrics_of(message: bytes) -> dict[str, float]:
    entries = [dict(wire.fields_of(value)) for number, value in wire.fields_of(message) if number == 3]
    return {entry[1].decode(): entry[2] for entry in entries}


def request_of(
    model: str, seq: int, data: Sequence[tuple[Sequence[int], Mapping[str, Any]]], loss: str, **numbers: float
) -> bytes:
    """A request for a pass, as bytes."""
    out = wire.bytes_field(1, model) + wire.number_field(2, seq) + wire.bytes_field(4, loss)
    for tokens, inputs in data:
        raw = np.asarray(tokens, "<i4").tobytes()
        datum = wire.bytes_field(1, wire.bytes_field(1, wire.bytes_field(1, raw)))
        for name, values in inputs.items():
            array = np.asarray(values, np.int64 if name == "target_tokens" else np.float32)
            datum += wire.entry(2, name, wire.bytes_field(2, wire.tensor(array)))
        out += wire.bytes_field(3, datum)
    for name, value in numbers.items():
        out += wire.entry(7, name, wire.bytes_field(2, wire.double_field(1, value)))
    return out
