"""What tenants use: counters, quotas of tokens by the minute, and all of it as metrics of Prometheus."""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch

_MOST_SHOWN = 1000  # most tenants with metrics of their own
_MINUTE = 60.0
_MOST_MINUTES = 4  # a request may use the tokens of this time; clients send a refused one again for five minutes


@dataclass(frozen=True)
class Quota:
    """What a tenant may use. None: as much as the server's own limits allow."""

    tokens_per_minute: int | None = None  # trained on, read as prompts, and sampled
    requests: int | None = None  # requests that wait or are computed at one time
    models: int | None = None
    bytes: int | None = None  # bytes of checkpoints


@dataclass
class Counts:
    """Counters of a tenant."""

    requests: int = 0
    failed: int = 0
    refused: int = 0  # for a quota or a limit, with status 429
    steps: int = 0
    trained_tokens: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0

    @property
    def tokens(self) -> int:
        return self.trained_tokens + self.prompt_tokens + self.sampled_tokens


@dataclass
class Budget:
    """A tenant's token bucket: it holds up to a minute's tokens and fills continuously. A request is accepted if any
    tokens are left. It may overdraw the bucket; later requests then wait until it is positive again. A request is
    charged for the most that it may draw, and refunded what it did not draw when it ends."""

    per_minute: int | None
    now: Callable[[], float] = time.monotonic
    left: float = 0.0
    seen: float = field(default=0.0)

    def __post_init__(self) -> None:
        self.left, self.seen = float(self.per_minute or 0), self.now()

    @property
    def most(self) -> int | None:
        """The most tokens that a request may use."""
        return None if self.per_minute is None else _MOST_MINUTES * self.per_minute

    def wait(self) -> float:
        """Return the seconds until a request is accepted; 0: now."""
        if self.per_minute is None:
            return 0.0
        now = self.now()
        self.left = min(self.left + (now - self.seen) * self.per_minute / _MINUTE, float(self.per_minute))
        self.seen = now
        return max(0.0, (1 - self.left) * _MINUTE / self.per_minute)

    def use(self, tokens: int) -> None:
        self.left -= tokens


def exposition(
    gauges: Mapping[str, float], counts: Mapping[str, Counts], waiting: Mapping[str, int], busy: float
) -> str:
    """Write metrics in Prometheus's text format. Tenants have the names of the file of keys, or digests of keys."""
    lines: list[str] = []
    for name, value in {**gauges, **_memory()}.items():
        lines += [f"# TYPE truestep_{name} gauge", f"truestep_{name} {value!r}"]
    lines += ["# TYPE truestep_busy_seconds_total counter", f"truestep_busy_seconds_total {busy:.3f}"]
    shown = sorted(counts, key=lambda tenant: -counts[tenant].requests)[:_MOST_SHOWN]
    lines += ["# TYPE truestep_requests_waiting gauge"]
    lines += [f'truestep_requests_waiting{{tenant="{tenant}"}} {waiting.get(tenant, 0)}' for tenant in shown]
    for one in fields(Counts):
        lines.append(f"# TYPE truestep_{one.name}_total counter")
        for tenant in shown:
            lines.append(f'truestep_{one.name}_total{{tenant="{tenant}"}} {getattr(counts[tenant], one.name)}')
    return "\n".join(lines) + "\n"


def _memory() -> dict[str, float]:
    found: dict[str, float] = {}
    with suppress(OSError, ValueError, IndexError):  # there is no /proc
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        found["resident_memory_bytes"] = pages * os.sysconf("SC_PAGE_SIZE")
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        used = {"gpu_memory_bytes": torch.cuda.memory_allocated(), "gpu_memory_used_bytes": total - free}
        found |= {**used, "gpu_memory_total_bytes": total}
    return found


def shown(gauges: Mapping[str, float], before: Counts, now: Counts, seconds: float) -> Iterator[str]:
    """Say in words what the server has and did, for a terminal."""
    yield f"{gauges['sessions']:.0f} sessions, {gauges['models']:.0f} models, {gauges['queue']:.0f} requests wait"
    for name, what in (("trained_tokens", "trained"), ("sampled_tokens", "sampled")):
        yield f"{(getattr(now, name) - getattr(before, name)) / seconds:,.0f} tokens/s {what}"
    for name, what in (("steps", "steps"), ("failed", "failed"), ("refused", "refused")):
        yield f"{getattr(now, name) - getattr(before, name)} {what}"
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        yield f"GPU {(total - free) / 2**30:.1f} of {total / 2**30:.1f} GiB"


def summed(counts: Mapping[str, Counts]) -> Counts:
    """Add up the counters of all tenants."""
    total = Counts()
    for one in counts.values():
        for each in fields(Counts):
            setattr(total, each.name, getattr(total, each.name) + getattr(one, each.name))
    return total
