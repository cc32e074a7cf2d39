"""The sustained rates of a machine, measured once and kept in the user's cache directory by card and torch version."""

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
# GiB that a process can allocate, by the name of the card. A plan may name a card instead of measuring it.
CARDS = {
    "H200": 139.0, "H100": 79.0, "B200": 178.0, "A100": 79.0, "A100-40": 39.4, "L40S": 44.4, "A6000": 47.5,
    "4090": 23.5, "5090": 31.3,
}  # fmt: skip
_SECONDS = 0.25  # duration of each measurement in seconds; a card reaches its power limit within milliseconds
_IDLE = 0.9  # a card with more than this share of its memory free counts as idle; only an idle card's rates are kept


class RatesError(TruestepError):
    """Raised if the option --card is neither a known card nor a file of rates."""


@dataclass(frozen=True)
class Rates:
    """Rates that a machine can sustain for seconds. They are lower than the peaks in data sheets."""

    card: str
    memory: float  # GiB that a process can allocate
    products: float  # FLOP/s of large matrix products in bfloat16
    products32: float  # the same in float32
    attention: float  # FLOP/s of torch's own attention over long documents
    flash: float  # the same with FlashAttention 4; 0 if it cannot be used
    copy: float  # bytes a second on the device, read and written bytes together
    bus: float  # bytes a second to host memory, while as many bytes are copied back
    launch: float  # seconds of host time to launch one operation
    link: float = 0.0  # bytes a second that a rank sends in an all-reduce; 0 if not measured

    def among(self, ranks: int) -> "Rates | None":
        """Return these rates, or None if there are several ranks and the link between them was not measured."""
        return self if ranks == 1 or self.link else None

    def uses_flash(self, wanted: str) -> bool:
        """Tell whether FlashAttention 4 is used with the value `wanted` of `model.attention`."""
        return self.flash > 0 and wanted != "torch"

    def of_attention(self, wanted: str) -> float:
        return self.flash if self.uses_flash(wanted) else self.attention

    def attention_slowness(self, wanted: str) -> float:
        """Return the time per FLOP of attention, as a multiple of that of matrix products, at least 1. It is rounded to
        halves, so that repeated measurements of one machine give the same distribution of documents over ranks."""
        return max(1.0, round(2 * self.products / self.of_attention(wanted)) / 2)


def named_rates(name: str) -> tuple[float, Rates | None]:
    """Return the GiB of a card with this name, or the GiB and rates in a file, measured on another machine."""
    if name.upper() in CARDS:
        return CARDS[name.upper()], None
    if not Path(name).is_file():
        raise RatesError(f"--card {name}: it is neither one of {', '.join(CARDS)} nor a file of kept rates")
    try:
        found = _read(Path(name))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RatesError(f"--card {name}: it is no file of kept rates: {error!r}") from error
    return found.memory, found


def rates_file(card: str, ranks: int, beside: int | None = None) -> Path:
    """Return the path of the file with a card's rates for a number of ranks, `beside` of them on each host."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    beside = beside or min(ranks, int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))
    words = (card, f"torch {torch.__version__}", f"{ranks} ranks, {beside} of a host")
    return base / "truestep" / "rates" / f"{'; '.join(words).replace('/', ' ')}.json"


def rates_here(ranks: Ranks, notes: list[str], measure: Callable[[], Rates] | None = None) -> Rates | None:
    """Return the rates of rank 0's card, read from the cache or measured in two seconds. Every rank calls this and gets
    the same rates. If they cannot be measured, return None and append a note to `notes`."""
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


def kept_network(ranks: int, beside: int) -> float | None:
    """Return the bytes a second between hosts that a run on this machine's card measured; None if there was none."""
    if not torch.cuda.is_available():
        return None
    found = _kept(rates_file(torch.cuda.get_device_name(), ranks, beside))[0]
    return None if found is None or not found.link else found.link


def kept_here(ranks: int) -> Rates | None:
    """Return the cached rates of this machine's card for a number of ranks; None if there are none."""
    return _kept(rates_file(torch.cuda.get_device_name(), ranks))[0] if torch.cuda.is_available() else None


def rates_of_plan(ranks: int) -> tuple[Rates | None, list[str]]:
    """Return rates of this machine for a plan, and notes. If none are cached for this number of ranks, return the rates
    of a single card, measured if needed."""
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
    """Measure the card. Return its rates, whether it was idle, and notes."""
    try:
        idle = not torch.cuda.is_available() or free_memory() > _IDLE * device_memory()
        return measure(), idle, []
    except Exception as error:  # memory is full or a kernel is missing: the run continues without rates
        return None, False, [f"note: the rates of this machine could not be measured: {printable(str(error), 200)}"]
    finally:
        if torch.cuda.is_available():  # do not change the run's memory and peak statistics
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def _keep(file: Path, rates: Rates, idle: bool) -> list[str]:
    if not idle:
        return ["note: other processes use this GPU, so its measured rates are not kept"]
    try:
        write_whole(file, json.dumps(asdict(rates), indent=1).encode())
    except (OSError, TruestepError) as error:
        return [f"note: the rates of this machine are measured at each start: {printable(str(error), 200)}"]
    return [f"the rates of this machine were measured, and are kept in {printable(file)}"]


def measure_here(device: str = "cuda") -> Rates:
    """Measure a card for about two seconds."""
    place, on_gpu = torch.device(device), device == "cuda"
    side, numbers, tokens = (8192, 2**28, 8192) if on_gpu else (256, 2**20, 256)
    own = torch.Generator(place).manual_seed(0)  # keeps the run's random state unchanged
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
    """Measure the FLOP/s of torch's attention and of FlashAttention 4, forward, over one causal document."""
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
    """Measure the bytes a second that each rank sends in an all-reduce over the largest group of ranks."""
    counts = {name: math.prod(ranks.size_of(axis) for axis in axes) for name, axes in MESH.items()}
    name = max(counts, key=lambda group: counts[group])
    place = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    value, count = torch.zeros(2**26 if place.type == "cuda" else 2**16, device=place), counts[name]
    # A fixed number of runs: ranks that stop by their own clocks would make different numbers of calls.
    spent = _seconds(lambda: ranks.sum_over(name, value), place, runs=10)
    return 2 * (count - 1) / count * value.nbytes / spent


def _both_ways(source: torch.Tensor, there: torch.Tensor) -> Callable[[], None]:
    """Return a function that copies one tensor to the host and another to the device at the same time."""
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
    """Return the mean seconds of `work` after a warm-up: over `runs` runs, or over a quarter of a second."""

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
