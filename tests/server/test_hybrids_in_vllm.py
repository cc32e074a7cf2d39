"""Models with recurrent layers train on what a real vLLM draws, and their weights reach it.

vLLM keeps states of recurrent layers for prompts that begin alike. vLLM 0.32 on a CPU fails where it would keep a state
from within a pass over a prompt: "index 4 is out of bounds", with or without a trainer. A pass of no more tokens than a
block keeps only the state behind its last token, which it can.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.models import HYBRIDS, make_hybrid
from server.runs import Recorder, label_versions, recorded, server_config
from server.vllm_server import Starter, VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

BLOCK = "128"  # tokens that vLLM keeps together on a CPU
PASSES = ("--max-num-batched-tokens", BLOCK, "--max-num-seqs", "64")


@pytest.fixture(scope="module")
def starter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    python = os.environ.get("TRUESTEP_VLLM")
    if not python:
        pytest.skip("TRUESTEP_VLLM does not name the Python of a vLLM: `make vllm` installs one and prints it")
    starter = Starter(python, tmp_path_factory.mktemp("vllm") / "starter.log")
    yield starter
    starter.stop()


def train(server: VllmServer, directory: Path) -> Recorder:
    """Each step's weights go to the server; they move far, so that a state of the weights before would show."""
    run = recorded(server_config(directory, [server.url], optimizer={"learning_rate": 1e-2}))
    assert run.trainer.run() == "all 4 steps are done"
    assert len(run.weights) >= 4, "each step's weights were sent"
    for seen, documents in run.steps:
        assert len(documents) == 16
        assert all((label_versions(document) == seen).all() for document in documents)
    return run


def hits(server: VllmServer) -> float:
    """Tokens of prompts that the server did not compute again."""
    found = re.search(r"^vllm:prefix_cache_hits_total\{.*\} (\S+)$", server.get("/metrics").text, re.MULTILINE)
    assert found is not None
    return float(found[1])


@pytest.mark.parametrize("family", HYBRIDS)
def test_documents_have_the_log_probs_of_their_weights(family: str, starter: Starter, tmp_path: Path) -> None:
    served = make_hybrid(tmp_path / "served", family, seed=100)
    make_hybrid(tmp_path / "model", family, seed=1)
    server = VllmServer(starter, served, tmp_path / "server.log", others=PASSES)
    try:
        server.start()
        server.wait()
        run = train(server, tmp_path)
        assert run.worst_gap() < 1e-4
        assert hits(server) > 0, "states were kept, and not beyond the weights that made them"
    finally:
        server.kill()
