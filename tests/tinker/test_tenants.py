"""No number of a tenant depends on the others: tenants whose adapters have other ranks and layers and whose steps have
other sizes train and sample at once, and each gets what it gets alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinker.house import House, arrays_of, metrics_of, request_of, served_in
from truestep.commands.tinker import wire
from truestep.commands.tinker.state import State


@dataclass(frozen=True)
class Tenant:
    rank: int
    documents: int
    longest: int
    loss: str = "ppo"
    mlp: bool = True

    @property
    def key(self) -> str:
        return f"tml-tenant-{self.rank}"

    def data(self, step: int) -> list[tuple[list[int], dict[str, Any]]]:
        draw = np.random.default_rng((self.rank, step))
        found = []
        for _ in range(self.documents):
            ids = draw.integers(3, 60, int(draw.integers(2, self.longest)) + 1).tolist()
            count = len(ids) - 1
            given: dict[str, Any] = {"weights": draw.random(count)}
            if self.loss == "ppo":
                given = {"logprobs": draw.normal(-4, 0.3, count), "advantages": draw.normal(size=count)}
            found.append((ids[:-1], {"target_tokens": ids[1:], **given}))
        return found


TENANTS = (
    Tenant(1, documents=1, longest=5),
    Tenant(2, documents=7, longest=30, loss="cross_entropy"),
    Tenant(4, documents=3, longest=60),
    Tenant(8, documents=12, longest=10, mlp=False),
    Tenant(16, documents=2, longest=63, loss="cross_entropy", mlp=False),
)


def shown(house: House, promise: dict[str, Any]) -> Any:
    answer = house.post("retrieve_future", {"request_id": promise["request_id"]})
    assert answer.status_code == 200, answer.text
    if "protobuf" not in answer.headers["content-type"]:
        found = answer.json()
        assert "error" not in found, found
        return found.get("metrics")
    return answer.content


def program(house: House, tenant: Tenant, gate: threading.Barrier) -> dict[str, Any]:
    """Three steps of two passes, all sent before a result is asked for; then samples of the adapter and of the base."""
    house.begin()
    lora = {"rank": tenant.rank, "seed": 5, "train_mlp": tenant.mlp}
    body = {"session_id": house.session, "model_seq_id": 0, "base_model": "model", "lora_config": lora}
    model, promises, seq = house.post("create_model", body).json()["model_id"], [], 0
    gate.wait(60)
    for step in range(3):
        for part in range(2):
            seq += 1
            raw = request_of(model, seq, tenant.data(2 * step + part), tenant.loss)
            promises.append(house.post("forward_backward", content=raw).json())
        seq += 1
        update = {"model_id": model, "seq_id": seq, "adam_params": {"learning_rate": 0.02}}
        promises.append(house.post("optim_step", update).json())
    house.recorded("base_sampler")
    promises.append(house.recorded("sampler", seq_id=seq + 1))
    trained = [shown(house, one) for one in promises]
    found = [one if not isinstance(one, bytes) else arrays_and_sums(one) for one in trained]
    own, base = (
        shown(house, house.recorded("sample", sampling_session_id=f"{house.session}:sample:{number}"))
        for number in (0, 1)
    )
    return {"trained": str(found), "own": own, "base": base}


def arrays_and_sums(message: bytes) -> Any:
    return [{name: one.tolist() for name, one in each.items()} for each in arrays_of(message)], metrics_of(message)


def sequences(message: bytes) -> list[tuple[list[int], np.ndarray]]:
    """The tokens and the log-probs of each sample."""
    made = (dict(wire.fields_of(value)) for number, value in wire.fields_of(message) if number == 1)
    return [(np.frombuffer(one[2], "<i4").tolist(), np.frombuffer(one[3], "<f4")) for one in made]


def served(folder: Path, checkpoints: Path, tenants: Sequence[Tenant]) -> tuple[list[dict[str, Any]], int]:
    """What tenants get that send at once; and how many of their requests for samples were computed with others."""
    house = served_in(folder, checkpoints)
    stopped, gate, together = threading.Event(), threading.Barrier(len(tenants)), 0

    def compute() -> None:
        while not stopped.is_set():
            if not house.tinker.turn():
                time.sleep(0.001)

    take = State.take

    def counted(self: State, most: int = 256) -> Any:
        nonlocal together
        taken = take(self, most)
        together += len(taken) if len(taken) > 1 else 0
        return taken

    with pytest.MonkeyPatch.context() as patch, house.client, ThreadPoolExecutor(len(tenants) + 1) as pool:
        patch.setattr(State, "take", counted)
        computing = pool.submit(compute)
        try:
            made = [pool.submit(program, house.of(one.key), one, gate) for one in tenants]
            found = [one.result(120) for one in made]
        finally:
            stopped.set()
            computing.result(60)
        house.settle()
    return found, together


def test_no_number_of_a_tenant_depends_on_the_others(tmp_path: Path) -> None:
    """Bit for bit where each is computed by itself; samples of the base model are drawn together, and their log-probs
    agree by the law."""
    found, _ = served(tmp_path, tmp_path / "together", TENANTS)
    assert len({one["trained"] for one in found}) == len(TENANTS)
    for number, tenant in enumerate(TENANTS):
        (alone,), together = served(tmp_path, tmp_path / f"alone-{tenant.rank}", [tenant])
        assert together == 0
        assert found[number]["trained"] == alone["trained"], tenant
        assert found[number]["own"] == alone["own"], tenant
        pairs = zip(sequences(found[number]["base"]), sequences(alone["base"]), strict=True)
        for (tokens, logprobs), (expected, own) in pairs:
            assert tokens == expected
            np.testing.assert_allclose(logprobs, own, rtol=0, atol=1e-5)
