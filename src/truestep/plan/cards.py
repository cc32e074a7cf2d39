"""The cards that times are planned for: what each sustains, from a table or measured on the machine at hand."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from truestep.errors import TruestepError
from truestep.policy.weights.host import zeros_on_host
from truestep.ranks.processes import machine_memory

_GIB = 2**30


class CardError(TruestepError):
    """The reason why there is no such card."""


@dataclass(frozen=True)
class Card:
    """Rates that hold for seconds, not peaks of data sheets."""

    name: str
    products: float  # bfloat16 operations a second of large matrix products
    memory: float  # GiB that a process can have
    copy: float  # bytes a second, read and written ones together
    bus: float  # bytes a second between it and host memory, each way, both ways at once
    link: float  # bytes a second to the other cards of its host
    network: float = 40e9  # bytes a second to cards of other hosts
    attention: float = 0.49  # of the rate of products, in long documents: torch's own kernels
    flash: float = 0.0  # the same with FlashAttention 4; 0: it does not run there


# The H200's were measured (benchmarks/RESULTS.md). The others' follow from it by their data sheets: the dense bfloat16
# rate (0.71 of it is sustained; 0.64 on cards of few watts), the memory's rate (0.87 of it), and the kind of bus.
CARDS = {
    card.name: card
    for card in (
        Card("H200", 700e12, 139.0, 4.2e12, 48e9, 350e9, flash=0.88),
        Card("H100", 700e12, 79.0, 2.9e12, 48e9, 350e9, flash=0.88),
        Card("B200", 1600e12, 178.0, 6.9e12, 48e9, 700e9, flash=0.7),
        Card("A100", 222e12, 79.0, 1.75e12, 22e9, 235e9, attention=0.7),
        Card("A100-40", 222e12, 39.4, 1.35e12, 22e9, 235e9, attention=0.7),
        Card("L40S", 210e12, 44.4, 0.75e12, 22e9, 18e9, attention=0.6),
        Card("A6000", 99e12, 47.5, 0.67e12, 22e9, 18e9, attention=0.6),
        Card("4090", 130e12, 23.5, 0.88e12, 22e9, 10e9, attention=0.7),
        Card("5090", 165e12, 31.3, 1.55e12, 44e9, 20e9, attention=0.7),
    )
}


def find_card(name: str) -> Card:
    """Find a card by its name, or in the file that a calibration wrote."""
    if name.upper() in CARDS:
        return CARDS[name.upper()]
    file = Path(name)
    if not file.is_file():
        raise CardError(f"--card {name}: it is neither one of {', '.join(CARDS)} nor a file of `plan --calibrate`")
    try:
        given = json.loads(file.read_text())
        return Card(str(given["name"]), **{f.name: float(given[f.name]) for f in fields(Card) if f.name != "name"})
    except (ValueError, KeyError, TypeError) as error:
        raise CardError(f"--card {name}: it is no file of `plan --calibrate`: {error!r}") from error


def card_here() -> Card | None:
    """Find the card of this machine in the table; None where there is none, or one that the table does not have."""
    if not torch.cuda.is_available():
        return None
    said = torch.cuda.get_device_name().upper().replace("RTX ", "")
    small = torch.cuda.get_device_properties(0).total_memory < 60 * _GIB
    for name in sorted(CARDS, key=len, reverse=True):
        if name in said and not (name == "A100" and small):
            return CARDS[name]
    return CARDS["A100-40"] if "A100" in said else None


def card_as_json(card: Card) -> str:
    return json.dumps(asdict(card), indent=1)


def calibrate(device: str = "auto") -> Card:
    """Measure the rates of this machine, in seconds. What several cards would tell is taken from the table."""
    place = torch.device("cuda" if torch.cuda.is_available() and device != "cpu" else "cpu")
    on_gpu = place.type == "cuda"
    side, numbers = (8192, 2**28) if on_gpu else (512, 2**22)
    a, b = (torch.randn(side, side, device=place).to(torch.bfloat16) for _ in range(2))
    products = 2 * side**3 / _seconds(lambda: a @ b, place)
    source, there = (torch.empty(numbers, dtype=torch.bfloat16, device=place) for _ in range(2))
    copy = 2 * source.nbytes / _seconds(lambda: there.copy_(source), place)
    bus = source.nbytes / _seconds(_both_ways(source, there), place) if on_gpu else copy / 2
    like = card_here() or CARDS["H100"]
    memory = torch.cuda.mem_get_info()[1] / _GIB if on_gpu else machine_memory() / _GIB
    name = torch.cuda.get_device_name() if on_gpu else "CPU"
    return Card(name, products, memory, copy, bus, like.link, like.network, like.attention, like.flash)


def _both_ways(source: torch.Tensor, there: torch.Tensor) -> Callable[[], None]:
    """Give what copies a tensor to the host while another one comes from there."""
    host = [zeros_on_host(source.shape, source.dtype, pinned=True) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def copy() -> None:
        for stream, (to, of) in zip(streams, ((host[0], source), (there, host[1])), strict=True):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                to.copy_(of, non_blocking=True)
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)

    return copy


def _seconds(work: Callable[[], Any], place: torch.device, least: float = 0.5) -> float:
    """Measure the seconds of one run of some work, over half a second of it after a first run."""

    def wait() -> None:
        if place.type == "cuda":
            torch.cuda.synchronize()

    work()
    wait()
    start, runs = time.perf_counter(), 0
    while (spent := time.perf_counter() - start) < least:
        for _ in range(5):
            work()
        wait()
        runs += 5
    return spent / runs
