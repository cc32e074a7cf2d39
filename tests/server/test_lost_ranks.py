"""A rank of the trainer is lost while a real vLLM samples: it gets the weights of the step that stands."""

from __future__ import annotations

from pathlib import Path

import pytest

from losing import train_on_a_server
from server.conftest import Servers

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.mark.parametrize("whom", ["first", "another"])
def test_runs_on_a_real_vllm(whom: str, servers: Servers, tmp_path: Path) -> None:
    train_on_a_server(tmp_path, servers.first.url, whom)
