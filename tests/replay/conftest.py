"""What all tests of replays share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _no_deterministic_after() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)
