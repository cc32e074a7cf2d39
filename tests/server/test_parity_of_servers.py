"""`parity` asks a real server as it is, and says what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from server.conftest import Servers
from server.models import make_model
from server.runs import server_config
from server.vllm_server import give_weights
from truestep.generate.servers.weight_files import WeightsDirectory
from truestep.model.loading.load import load_policy
from truestep.tools.parity.gap import parity

pytestmark = pytest.mark.vllm


def serve(url: str, model: Path, directory: Path) -> None:
    """Other tests have left their weights in the server."""

    give_weights(url, WeightsDirectory(directory).write(load_policy(model, device="cpu"), 0, torch.float32))


def test_a_server_that_is_right(servers: Servers, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", seed=1)
    serve(servers.first.url, model, tmp_path / "weights")
    result = parity(server_config(tmp_path, [servers.first.url]), documents=24)
    assert result.fine and result.base.worst < 1e-4, result.verdict


def test_a_server_that_reports_raw_logprobs(servers: Servers, tmp_path: Path) -> None:
    """vLLM's default leaves the temperature out of what it reports."""
    model = make_model(tmp_path / "model", seed=1)
    serve(servers.raw.url, model, tmp_path / "weights")
    result = parity(server_config(tmp_path, [servers.raw.url]), documents=24)
    assert result.tried[0].cause == "temperature" and result.tried[0].switch == "temperature 1"
    assert result.verdict.startswith("temperature")


def test_a_server_with_older_weights(servers: Servers, tmp_path: Path) -> None:
    make_model(tmp_path / "model", seed=1)
    old = make_model(tmp_path / "old", seed=7)
    serve(servers.second.url, old, tmp_path / "weights")
    result = parity(server_config(tmp_path, [servers.second.url]), documents=24, older=[old])
    assert result.tried[0].cause == "stale weights"
    assert result.explained(result.tried[0]) > 0.99
