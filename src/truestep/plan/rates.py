"""What a machine sustains: measured once, and kept in the user's cache directory under the card's and torch's names."""

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from truestep.errors import TruestepError
from truestep.files.whole import write_whole
from truestep.gpu.memory import device_memory, free_memory
from truestep.gpu.pinned import zeros_on_host
from truestep.model.mixers import flash
from truestep.ranks.axes import MESH
from truestep.ranks.group import ALONE, Ranks
from truestep.text import printable

GIB = 2**30
# GiB that a process can have of a card which a plan may name instead of measuring it.
CARDS = {
    "H200": 139.0, "H100": 79.0, "B200": 178.0, "A100": 79.0, "A100-40": 39.4, "L40S": 44.4, "A6000": 47.5,
    "4090": 23.5, "5090": 31.3,
}  # fmt: skip
_SECONDS = 0.25  # of each measurement: a card reaches its power limit within milliseconds
_IDLE = 0.9  # of a card's memory is free where nobody else computes on it: then its rates are worth keeping


class RatesError(TruestepError):
    """The reason why there is no such card."""


@dataclass(frozen=True)
class Rates:
    """What holds for seconds, not the peaks of data sheets."""

    card: str
    memory: float  # GiB that a process can have
    products: float  # operations a second of large matrix products, in bfloat16
    products32: float  # the same in float32
    attention: float  # operations a second of torch's own attention over long documents
    flash: float  # the same with FlashAttention 4; 0 where it cannot be used
    copy: float  # bytes a second, read and written ones together
    bus: float  # bytes a second to host memory, while as many come back
    launch: float  # seconds in which the host launches one operation
    link: float = 0.0  # bytes a second that a rank sends in an all-reduce; 0 where it was not measured

    def among(self, ranks: int) -> "Rates | None":
        """Give these rates where they are all that so many ranks need: None where their link was not measured."""
        return self if ranks == 1 or self.link else None

    def uses_flash(self, wanted: str) -> bool:
        """Tell whether FlashAttention 4 serves an option `model.attention`."""
        return self.flash > 0 and wanted != "torch"

    def of_attention(self, wanted: str) -> float:
        return self.flash if self.uses_flash(wanted) else self.attention

    def attention_slowness(self, wanted: str) -> float:
        """Give the time of attention's operations, of those of products: in halves, so that two measurements of one
        machine spread documents alike."""
        return max(1.0, round(2 * self.products / self.of_attention(wanted)) / 2)


def named_rates(name: str) -> tuple[float, Rates | None]:
    """Find a card's GiB by its name, or GiB and rates in a file that another machine has kept."""
    if name.upper() in CARDS:
        return CARDS[name.upper()], None
    if not Path(name).is_file():
        raise RatesError(f"--card {name}: it is neither one of {', '.join(CARDS)} nor a file of kept rates")
    try:
        found = _read(Path(name))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RatesError(f"--card {name}: it is no file of kept rates: {error!r}") from error
    return found.memory, found


def rates_file(card: str, ranks: int) -> Path:
    """Name the file that keeps the rates of a card among so many ranks."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    beside = min(ranks, int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))  # of one host
    words = (card, f"torch {torch.__version__}", f"{ranks} ranks, {beside} of a host")
    return base / "truestep" / "rates" / f"{'; '.join(words).replace('/', ' ')}.json"


def rates_here(ranks: Ranks, notes: list[str], measure: Callable[[], Rates] | None = None) -> Rates | None:
    """Give the rates of this machine, those of rank 0's card to every rank: kept ones, or measured for two seconds.
    Every rank calls this. None, and a note, where they cannot be measured."""
    if measure is None and not torch.cuda.is_available():
        return None
    file = rates_file(torch.cuda.get_device_name() if measure is None else "a test", ranks.size)
    rates, said = ranks.share(lambda: _kept(file))
    notes += said
    if rates is None:
        rates, idle, said = ranks.share(lambda: _measured(measure or measure_here))
        notes += said
        if rates is None:
            return None
        if ranks.size > 1:
            link = measure_link(ranks)
            rates = replace(rates, link=ranks.share(lambda: link))
        notes += ranks.share(lambda: _keep(file, rates, idle))
    return rates


def kept_here(ranks: int) -> Rates | None:
    """Give the rates that this machine's card was found to have among so many ranks; None where none are kept."""
    return _kept(rates_file(torch.cuda.get_device_name(), ranks))[0] if torch.cuda.is_available() else None


def rates_of_plan(ranks: int) -> tuple[Rates | None, list[str]]:
    """Give the rates of this machine for a plan of so many ranks, and notes: where those of so many are not kept, those
    of one card. It is measured where it has to be."""
    notes: list[str] = []
    return kept_here(ranks) or rates_here(ALONE, notes), notes


def _kept(file: Path) -> tuple[Rates | None, list[str]]:
    try:
        return _read(file), []
    except FileNotFoundError:
        return None, []
    except (OSError, ValueError, KeyError, TypeError) as error:
        return None, [f"note: {printable(file)} is damaged ({type(error).__name__}): the machine is measured again"]


def _read(file: Path) -> Rates:
    given = json.loads(file.read_text(encoding="utf-8"))
    numbers = {each.name: float(given[each.name]) for each in fields(Rates) if each.name != "card"}
    may_be_zero = ("flash", "link")
    if not all(
        math.isfinite(rate) and (rate > 0 or (not rate and name in may_be_zero)) for name, rate in numbers.items()
    ):
        raise ValueError("a rate is no positive number")
    return Rates(str(given["card"]), **numbers)


def _measured(measure: Callable[[], Rates]) -> tuple[Rates | None, bool, list[str]]:
    """Measure the card; tell too whether it was idle."""
    try:
        idle = not torch.cuda.is_available() or free_memory() > _IDLE * device_memory()
        return measure(), idle, []
    except Exception as error:  # the card is full, or a kernel is missing: no run ends for it
        return None, False, [f"note: the rates of this machine could not be measured: {printable(str(error), 200)}"]
    finally:
        if torch.cuda.is_available():  # neither the run's memory nor its peak has any of it
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def _keep(file: Path, rates: Rates, idle: bool) -> list[str]:
    if not idle:
        return ["note: others use this GPU: its rates were measured beside them, and are not kept"]
    try:
        write_whole(file, json.dumps(asdict(rates), indent=1).encode())
    except (OSError, TruestepError) as error:
        return [f"note: the rates of this machine are measured at each start: {printable(str(error), 200)}"]
    return [f"the rates of this machine were measured, and are kept in {printable(file)}"]


def measure_here(device: str = "cuda") -> Rates:
    """Measure a card for about two seconds."""
    place, on_gpu = torch.device(device), device == "cuda"
    side, numbers, tokens = (8192, 2**28, 8192) if on_gpu else (256, 2**20, 256)
    own = torch.Generator(place).manual_seed(0)  # the run's own random numbers stay as they are
    a, b = (torch.randn(side, side, device=place, generator=own) for _ in range(2))
    products32 = 2 * side**3 / _seconds(lambda: a @ b, place)
    a, b = a.bfloat16(), b.bfloat16()
    products = 2 * side**3 / _seconds(lambda: a @ b, place)
    source, there = (torch.zeros(numbers, dtype=torch.bfloat16, device=place) for _ in range(2))
    copy = 2 * source.nbytes / _seconds(lambda: there.copy_(source), place)
    bus = source.nbytes / _seconds(_both_ways(source, there), place) if on_gpu else copy / 2
    small = torch.zeros(1, device=place)
    launch = _seconds(lambda: [small.add_(1) for _ in range(100)], place) / 100
    torch_rate, flash_rate = _attention(place, tokens, own)
    memory = device_memory() / GIB if on_gpu else 1.0
    card = torch.cuda.get_device_name() if on_gpu else "CPU"
    return Rates(card, memory, products, products32, torch_rate, flash_rate, copy, bus, launch)


def _attention(place: torch.device, tokens: int, own: torch.Generator) -> tuple[float, float]:
    """Measure the forward pass of torch's attention and of FlashAttention 4 over one causal document."""
    heads = flash.Heads(16, 8, 128, 128, 128**-0.5)
    q = torch.randn(1, 16, tokens, 128, device=place, dtype=torch.bfloat16, generator=own)
    operations = 2 * 16 * 128 * tokens**2
    attend = torch.nn.functional.scaled_dot_product_attention
    by_torch = operations / _seconds(lambda: attend(q, q, q, is_causal=True), place)
    if flash.problem((heads,), q.dtype, place) is not None:
        return by_torch, 0.0
    packed = q[0].transpose(0, 1).contiguous()
    key = packed[:, :8].contiguous()
    bounds = torch.tensor([0, tokens], dtype=torch.int32, device=place)
    by_flash = _seconds(lambda: flash.attend(packed, key, key, bounds, tokens, heads.scale, None, None), place)
    return by_torch, operations / by_flash


def measure_link(ranks: Ranks) -> float:
    """Measure the bytes a second that each rank sends in an all-reduce among the largest group of its ranks."""
    counts = {name: math.prod(ranks.size_of(axis) for axis in axes) for name, axes in MESH.items()}
    name = max(counts, key=lambda group: counts[group])
    place = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    value, count = torch.zeros(2**26 if place.type == "cuda" else 2**16, device=place), counts[name]
    # As often on every rank: none may stop by its own clock.
    spent = _seconds(lambda: ranks.sum_over(name, value), place, runs=10)
    return 2 * (count - 1) / count * value.nbytes / spent


def _both_ways(source: torch.Tensor, there: torch.Tensor) -> Callable[[], None]:
    """Copy a tensor to the host while another one comes from there."""
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


def _seconds(work: Callable[[], Any], place: torch.device, runs: int | None = None) -> float:
    """Measure the seconds of one run of some work: over so many runs, or a quarter of a second, after a first one."""

    def wait() -> None:
        if place.type == "cuda":
            torch.cuda.synchronize()

    work()
    wait()
    start, done = time.perf_counter(), 0
    while (spent := time.perf_counter() - start) < _SECONDS if runs is None else done < runs:
        for _ in range(5):
            work()
        wait()
        done += 5
    return (time.perf_counter() - start if runs else spent) / done
