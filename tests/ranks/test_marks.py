"""Marks: what a device was only asked to do is no progress, what it has done is."""

from __future__ import annotations

import time

import pytest
import torch

from truestep.gpu import marks
from truestep.process import progress


def count(kind: str) -> float:
    return progress.amounts().get(kind, 0)


def test_on_a_cpu_a_mark_is_progress_at_once() -> None:
    before = count("passes of a test")
    marks.mark("passes of a test", torch.device("cpu"))
    assert count("passes of a test") == before + 1
    assert not marks.outstanding()


def test_layers_report_their_work_and_that_of_their_gradients_where_they_are_asked_to() -> None:
    layer = torch.nn.Linear(2, 2)
    layer.register_forward_hook(marks.layer_done)
    before = count("layers")
    layer(torch.ones(1, 2)).sum().backward()
    assert count("layers") == before, "as where tokens are sampled, which are counted themselves"
    with marks.layers_report():
        output = layer(torch.ones(1, 2))
        assert count("layers") == before + 1
        output.sum().backward()
        assert count("layers") == before + 2
        with torch.no_grad():
            layer(torch.ones(1, 2))
        assert count("layers") == before + 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_device_that_has_not_come_so_far_makes_no_progress() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    marks.mark("first", device)
    torch.cuda.synchronize()
    marks.outstanding()
    done = count("pieces of work on a device")
    torch.cuda._sleep(4 * 10**9)  # cycles: about two seconds
    marks.mark("second", device)
    for _ in range(5):
        assert marks.outstanding() and count("pieces of work on a device") == done
        time.sleep(0.05)
    torch.cuda.synchronize()
    assert not marks.outstanding() and count("pieces of work on a device") == done + 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_mark_disturbs_no_capture() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    marks.mark("first", device)
    torch.cuda.synchronize()
    value = torch.zeros(4, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value += 1
        marks.mark("captured", device)
        marks.outstanding()
    graph.replay()
    torch.cuda.synchronize()
    assert value.sum() == 4 and not marks.outstanding()
