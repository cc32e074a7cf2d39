"""Real servers, started once for all tests that ask for them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from server.models import give_sampling_defaults, make_model
from server.vllm_server import LINKED, Starter, VllmServer


@dataclass(frozen=True)
class Servers:
    first: VllmServer
    second: VllmServer
    linked: VllmServer  # takes weights by vLLM's own backend for NCCL, over gloo
    raw: VllmServer  # of raw_logprobs, as vLLM's default is
    model: Path  # what they were started with


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    python = os.environ.get("TRUESTEP_VLLM")
    if not python:
        pytest.skip("TRUESTEP_VLLM does not name the Python of a vLLM: `make vllm` installs one and prints it")
    directory = tmp_path_factory.mktemp("vllm")
    model = give_sampling_defaults(make_model(directory / "model", seed=100))
    starter = Starter(python, directory / "starter.log")
    made = {
        "first": VllmServer(starter, model, directory / "first.log"),
        "second": VllmServer(starter, model, directory / "second.log"),
        "linked": VllmServer(starter, model, directory / "linked.log", others=LINKED),
        "raw": VllmServer(starter, model, directory / "raw.log", logprobs_mode="raw_logprobs"),
    }
    try:
        for server in made.values():
            server.start()
        for server in made.values():
            server.wait()
        yield Servers(**made, model=model)
    finally:
        for server in made.values():
            server.kill()
        starter.stop()
