"""A mixture of experts trains asynchronously through a real vLLM, which has each expert as it was sent.

After each load of weights the server tells the checksums of its experts, from the tensors that its kernels read. They
are compared with those of the trainer's model at the time of that version.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from server.demo_runs import ENOUGH, StopWhenAccurate, on_servers, warm_up
from server.experts_in_vllm import checksum, each_expert
from server.linked_server import BY_LINK
from server.models import make_mixture
from server.runs import Recorder, recorded, server_config
from server.vllm_server import LINKED, Starter, VllmServer
from small_runs import quiet_trainer, read_lines
from truestep.generate.errors import WeightsError
from truestep.generate.servers.host_copies import HostWeights
from truestep.generate.servers.vllm import Vllm

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

# As examples/experts', but for the heads: vLLM's attention for CPUs knows none that are smaller.
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "initializer_range": 0.08,
}
OPTIONS = ("--worker-extension-cls", "server.experts_in_vllm.ExpertChecksums", *LINKED)
MATRICES = 2 * 8 * 3  # two layers of eight experts


@dataclass
class Asked:
    """The version of each load of a server, and the checksums that the server told after it."""

    told: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    before_load: Callable[[Path], None] = lambda weights: None

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        load, send = Vllm.load, Vllm.send

        async def ask(server: Vllm, version: int) -> None:
            answer: Any = await server._order("/collective_rpc", {"method": "expert_checksums"})
            (sums,) = answer["results"]
            self.told.append((version, sums))

        async def loaded(server: Vllm, weights: Path) -> None:
            self.before_load(weights)
            await load(server, weights)
            await ask(server, int(weights.name.split("-")[2]))

        async def received(server: Vllm, weights: HostWeights) -> None:
            await send(server, weights)
            await ask(server, int(weights.name.split("-")[0]))

        monkeypatch.setattr(Vllm, "load", loaded)
        monkeypatch.setattr(Vllm, "send", received)


def sent(weights: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the checksums of a trainer's experts."""
    sums = {}
    for name, gate_up in weights.items():
        if (found := re.fullmatch(r"(.*\.experts)\.gate_up_proj", name)) is not None:
            experts = each_expert(found[1], gate_up, weights[f"{found[1]}.down_proj"])
            sums |= {key: checksum(weight) for key, weight in experts}
    return sums


def differences(run: Recorder, asked: Asked) -> list[set[str]]:
    """Name the experts' matrices that a server did not have as they were sent, for each load."""
    unasked = set(run.weights) - {version for version, _ in asked.told}
    assert unasked <= {max(run.weights)}, "the server was asked after each load; the run's end may come before the last"
    found = []
    for version, told in asked.told:
        expected = sent(run.weights[version])
        assert set(told) == set(expected) and len(set(expected.values())) == len(expected) == MATRICES
        found.append({name for name, value in told.items() if value != expected[name]})
    return found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    python = os.environ.get("TRUESTEP_VLLM")
    if not python:
        pytest.skip("TRUESTEP_VLLM does not name the Python of a vLLM: `make vllm` installs one and prints it")
    folder = tmp_path_factory.mktemp("vllm")
    starter = Starter(python, folder / "starter.log")
    served = make_mixture(folder / "served", seed=100, **SIZES)
    server = VllmServer(starter, served, folder / "server.log", others=OPTIONS)
    try:
        server.start()
        server.wait()
        yield server
    finally:
        server.kill()
        starter.stop()


def test_a_mixture_trains_through_a_server(server: VllmServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked()
    asked.patch(monkeypatch)
    policy = warm_up(make_mixture(tmp_path / "model", seed=0, spread=False, **SIZES), tmp_path)
    run = Recorder(quiet_trainer(on_servers(policy, tmp_path, server.url)))
    run.trainer.sinks.append(StopWhenAccurate(run.trainer))
    run.trainer.run()

    evaluations = read_lines(tmp_path / "grpo" / "evaluation.jsonl")
    assert evaluations[0]["sampled_reward"] < 0.6
    assert evaluations[-1]["sampled_reward"] >= ENOUGH
    staleness = [line["max_staleness"] for line in read_lines(tmp_path / "grpo" / "metrics.jsonl")]
    assert sum(steps > 0 for steps in staleness) > len(staleness) / 2, "sampling went on beside training"
    assert not any(differences(run, asked))
    versions = {version for version, _ in asked.told}
    assert len({value for _, told in asked.told for value in told.values()}) == MATRICES * len(versions) > MATRICES
    gap = run.worst_gap()
    assert gap < 1e-4, "every label, by the weights of the version that it names"
    print(f"{len(staleness)} steps, {len(asked.told)} loads of {MATRICES} matrices, gap {gap:.1e}, {evaluations[-1]}")


def test_experts_that_are_sent_are_the_trainers(
    server: VllmServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked()
    asked.patch(monkeypatch)
    make_mixture(tmp_path / "model", seed=1, **SIZES)
    run = recorded(server_config(tmp_path, [server.url], sampler={**BY_LINK, "max_staleness": 16}))
    assert run.trainer.run() == "all 4 steps are done"
    assert not (tmp_path / "run" / "weights").exists(), "nothing went over the disk"
    assert len(asked.told) >= 4 and not any(differences(run, asked))
    assert run.worst_gap() < 1e-4


def swap_experts(weights: Path, layer: int, routers: bool) -> None:
    """Exchange experts 2 and 5 of a layer in a directory of weights; with `routers`, also what chooses them."""
    expert = f"model.layers.{layer}.mlp.experts.2."
    index = json.loads((weights / "model.safetensors.index.json").read_text(encoding="utf-8"))["weight_map"]
    (file,) = {weights / file for name, file in index.items() if name.startswith(expert)}
    found = load_file(file)
    for name in [name for name in found if name.startswith(expert)]:
        other = name.replace(".experts.2.", ".experts.5.")
        found[name], found[other] = found[other], found[name]
    if routers:
        rows = found[f"model.layers.{layer}.mlp.gate.weight"]
        rows[[2, 5]] = rows[[5, 2]]
    save_file(found, file, {"format": "pt"})


@pytest.mark.parametrize("routers", [False, True], ids=["alone", "with their routers"])
def test_swapped_experts_are_named(
    routers: bool, server: VllmServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A probe of log-probs sees experts alone; with their routers the model computes the same, by other numbers."""
    asked = Asked(before_load=lambda weights: swap_experts(weights, 1, routers))
    asked.patch(monkeypatch)
    make_mixture(tmp_path / "model", seed=1, **SIZES)
    run = recorded(server_config(tmp_path, [server.url], schedule={"steps": 1}))
    if routers:
        run.trainer.run()
        assert run.worst_gap() < 1e-4
    else:
        with pytest.raises(WeightsError, match="nats away from the trainer"):
            run.trainer.run()
    swapped = {
        f"model.layers.1.mlp.experts.{number}.{kind}_proj" for number in (2, 5) for kind in ("gate", "up", "down")
    }
    found = differences(run, asked)
    assert found and all(names == swapped for names in found)
