"""The client of benchmarks/tenants.py: the Tinker protocol by the standard library, in a process of its own."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from truestep.commands.tinker import wire

SAMPLES = 4  # of a prompt


@dataclass
class Tenant:
    """A tenant with one model."""

    url: str
    number: int
    rank: int
    seq: int = 0
    drawn: int = 0
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        place = urlsplit(self.url)
        assert place.hostname is not None
        self._connection = HTTPConnection(place.hostname, place.port, timeout=600)
        self.session = self.post("create_session", {"tags": [], "sdk_version": "0.38.0"})["session_id"]
        lora = {"rank": self.rank, "seed": self.number}
        body = {"session_id": self.session, "model_seq_id": 0, "base_model": "model", "lora_config": lora}
        self.model = self.result(self.post("create_model", body))["model_id"]

    def send(self, path: str, body: bytes, kind: str) -> tuple[int, str, bytes]:
        headers = {"content-type": kind, "x-api-key": f"tml-benchmark-{self.number}"}
        try:
            self._connection.request("POST", f"/api/v1/{path}", body, headers)
            answer = self._connection.getresponse()
        except (ConnectionError, HTTPException):  # the server closes what was idle for some seconds
            self._connection.close()
            self._connection.request("POST", f"/api/v1/{path}", body, headers)
            answer = self._connection.getresponse()
        return answer.status, answer.headers.get("content-type", ""), answer.read()

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        status, _, raw = self.send(path, json.dumps(body).encode(), "application/json")
        assert status == 200, raw
        return json.loads(raw)

    def result(self, promise: Mapping[str, Any]) -> Any:
        """Wait for a future: JSON, or a message's bytes."""
        body, status = json.dumps({"request_id": promise["request_id"]}).encode(), 408
        while status == 408:
            status, kind, raw = self.send("retrieve_future", body, "application/json")
        assert status == 200, raw
        found = raw if "protobuf" in kind else json.loads(raw)
        assert isinstance(found, bytes) or "error" not in found, found
        return found

    def step(self, data: bytes) -> None:
        """A gradient and an update, sent together; wait for both."""
        head = wire.bytes_field(1, self.model) + wire.number_field(2, self.seq + 1) + wire.bytes_field(4, "ppo")
        status, _, raw = self.send("forward_backward", head + data, "application/x-protobuf")
        assert status == 200, raw
        body = {"model_id": self.model, "seq_id": self.seq + 2, "adam_params": {"learning_rate": 1e-5}}
        update = self.post("optim_step", body)
        self.seq += 2
        self.losses.append(loss_of(self.result(json.loads(raw))))
        self.result(update)

    def samples(self, prompts: int, new: int) -> None:
        """Save the weights for a sampler, and draw from them."""
        self.seq, self.drawn = self.seq + 1, self.drawn + 1
        body = {"model_id": self.model, "seq_id": self.seq, "sampling_session_seq_id": self.drawn}
        sampler = self.result(self.post("save_weights_for_sampler", body))["sampling_session_id"]
        draw = {"max_tokens": new, "temperature": 1.0, "stop": [], "seed": 1}
        promises = []
        for number in range(prompts):
            tokens = [3 + (number + self.number) % 7, *range(3, 67)]
            prompt = {"chunks": [{"tokens": tokens, "type": "encoded_text"}]}
            asked = {"num_samples": SAMPLES, "prompt": prompt, "sampling_params": draw}
            promises.append(self.post("asample", {**asked, "sampling_session_id": sampler, "seq_id": number}))
        for promise in promises:
            self.result(promise)


def loss_of(message: bytes) -> float:
    entries = (dict(wire.fields_of(value)) for number, value in wire.fields_of(message) if number == 3)
    return float({entry[1].decode(): entry[2] for entry in entries}["loss:sum"])


def message_of(records: Sequence[Mapping[str, Any]]) -> bytes:
    """The data of a pass over records whose prompt is one token."""
    out = b""
    for record in records:
        ids, labels = np.asarray(record["input_ids"]), len(record["input_ids"]) - 1
        datum = wire.bytes_field(1, wire.bytes_field(1, wire.bytes_field(1, ids[:-1].astype("<i4").tobytes())))
        advantages = np.full(labels, record["advantage"], np.float32)
        inputs = {"target_tokens": ids[1:], "logprobs": np.asarray(record["logprobs"], np.float32)}
        for name, values in {**inputs, "advantages": advantages}.items():
            datum += wire.entry(2, name, wire.bytes_field(2, wire.tensor(values)))
        out += wire.bytes_field(3, datum)
    return out


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(url: str, folder: Path) -> dict[str, Any]:
    given = json.loads((folder / "plan.json").read_text())
    records = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    each, own, warm = given["documents"], given["tenant_documents"], given["warm"]
    steps = [message_of(records[first : first + each]) for first in range(0, len(records), each)]
    first = Tenant(url, 0, given["rank"])
    times = [timed(lambda step=step: first.step(step)) for step in steps]  # type: ignore[misc]
    found: dict[str, Any] = {"step": statistics.median(times[warm:])}
    print(f"client: a step of {each} documents took {found['step']:.3f} s", flush=True)
    data = [message_of(records[at * own : (at + 1) * own]) for at in range(given["tenants"])]
    return {**found, "one": together(url, given, data[:1], 10), "all": together(url, given, data, 3)}


def together(url: str, given: Mapping[str, Any], data: Sequence[bytes], steps: int) -> dict[str, Any]:
    """What tenants get together, each with data of its own: tokens a second; and the losses of the first."""
    with ThreadPoolExecutor(len(data)) as threads:

        def everyone(work: Callable[[Tenant], object]) -> float:
            return timed(lambda: list(threads.map(work, tenants)))

        def train(tenant: Tenant) -> None:
            for _ in range(steps):
                tenant.step(data[tenant.number])

        tenants = list(threads.map(lambda number: Tenant(url, number, given["rank"]), range(len(data))))
        everyone(lambda tenant: tenant.step(data[tenant.number]))
        tokens = steps * len(data) * given["tenant_documents"] * (given["length"] - 1)
        found: dict[str, Any] = {"trained": tokens / everyone(train), "losses": tenants[0].losses[:4]}
        print(f"client: {len(data)} trained {found['trained']:,.0f} tokens/s", flush=True)
        if not given["no_samples"]:
            everyone(lambda tenant: tenant.samples(1, 2))
            spent = everyone(lambda tenant: tenant.samples(given["prompts"], given["new"]))
            found["sampled"] = len(data) * given["prompts"] * SAMPLES * given["new"] / spent
            print(f"client: {len(data)} sampled {found['sampled']:,.0f} tokens/s", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--url", required=True)
    given = parser.parse_args()
    (given.folder / "found.json").write_text(json.dumps(measure(given.url, given.folder)))


if __name__ == "__main__":
    main()
