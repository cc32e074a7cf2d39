"""Products of eight ranks are the step of one process, by the float64 oracle; those of four: tests/verify."""

from __future__ import annotations

from pathlib import Path

import pytest

from ranks.test_layouts import Layout, Model, check_losses

OF_EIGHT: list[Layout] = [
    ({"data_replicate": 2, "context": 2, "tensor": 2}, 1, 40),
    ({"tensor": 2, "pipeline": 2}, 2, 30),
    ({"context": 2, "tensor": 2, "pipeline": 2}, 1, 30),
    ({"context": 4, "pipeline": 2}, 1, 30),
    ({"tensor": 4, "pipeline": 2}, 1, 30),
    ({"data_replicate": 2, "context": 2, "reduce_each_micro_batch": True}, 1, 24),
]


@pytest.mark.release
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_products_of_eight_ranks(kind: str, tiny_model: Model, tmp_path: Path) -> None:
    """A loss of labels and one of whole documents."""
    check_losses(8, kind, OF_EIGHT, tiny_model, tmp_path, ("grpo", "gspo"))
