"""The plan as text: memory by kind, time by part, whether it fits, and layouts and options that fit."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from truestep.config.schema import Config
from truestep.errors import TruestepError
from truestep.files.whole import write_whole
from truestep.plan.advice import layout_of, savings
from truestep.plan.cost import BUBBLES, Hosts, SharedPrompt, StepTime, Work, exchanges, plan_time
from truestep.plan.memory import (
    GIB,
    LABELS,
    RankMemory,
    computed_size,
    has_reference,
    host_bytes,
    kept_bytes,
    masters_offloaded,
    offloaded,
    offloads_reference,
    plan_memory,
    staged_bytes,
)
from truestep.plan.rates import Rates, kept_network
from truestep.plan.room import too_small
from truestep.plan.search import ROOM, first_that_fits, settle
from truestep.plan.shape import ModelShape, read_shape
from truestep.ranks.axes import RankLayout

_RECORD_BYTES = 4.0  # bytes per token of a kept record: compression halves ids, and hardly affects log-probs


@dataclass(frozen=True)
class PlanReport:
    """The planned memory and time of a configuration on a number of ranks."""

    config: Config  # the configuration, with chosen values for options that say `auto`
    shape: ModelShape
    layout: RankLayout
    ranks: int
    memory: float | None  # GiB per rank
    rates: Rates | None  # None if not known for this number of ranks; then no time is planned
    length: float | None  # tokens per document
    prompt: SharedPrompt | None
    switched_on: dict[str, Any]
    hosts: Hosts | None = None  # None: one

    @staticmethod
    def of(
        config: Config,
        ranks: int,
        memory: float | None = None,
        rates: Rates | None = None,
        length: float | None = None,
        hosts: Hosts | None = None,
        prompt: SharedPrompt | None = None,
    ) -> "PlanReport":
        shape, layout = read_shape(config), layout_of(config, ranks)
        if rates is not None:  # without a rate of what is exchanged, no time is planned
            rates = rates.among(ranks if hosts is None else hosts.gpus)
        if hosts is not None and hosts.network is None:
            rates = None
        switched_on = dict[str, Any]()
        if memory is not None:
            config, switched_on = settle(config, shape, layout, memory * GIB * ROOM, rates, hosts)
        return PlanReport(config, shape, layout, ranks, memory, rates, length, prompt, switched_on, hosts)

    @property
    def planned(self) -> list[RankMemory]:
        return plan_memory(self.config, self.shape, self.layout)

    @property
    def peak(self) -> float:
        return max(rank.total for rank in self.planned)

    @property
    def fits(self) -> bool:
        return self.memory is None or self.peak <= self.memory * GIB

    @property
    def time(self) -> StepTime | None:
        if self.rates is None:
            return None
        return plan_time(self.config, self.shape, self.layout, self.rates, self._work, self.hosts)

    @property
    def _work(self) -> Work:
        sizes = self.layout.by_name
        return Work.of(self.config, sizes["data_shard"] * sizes["data_replicate"], self.length, self.prompt)

    def lines(self) -> list[str]:
        planned = self.planned
        lines = [*_title(self.config, self.shape, self.layout), "", *_table(planned), ""]
        lines += _remarks(self.config, self.shape, self.layout)
        if (kept := self.config.logging.rollouts) is not None and kept.documents == "all":
            size = _RECORD_BYTES * self._work.tokens / 1e6
            lines.append(
                f"Whole records take about {size:,.1f} MB of disk a step, and {kept.gigabytes:g} GB at most "
                "(logging.rollouts)."
            )
        lines += [f"auto: {name} is {str(value).lower()} here." for name, value in self.switched_on.items()]
        lines += ["", *self._time_lines()]
        if self.hosts is not None:
            lines += ["", *exchange_lines(self, self.hosts)]
        if self.memory is not None:
            lines += ["", *self._verdict()]
        elif (warning := too_small(self.config, self.ranks)) is not None:
            lines += ["", f"Here {warning}.", "--memory GIB plans for another machine."]
        return lines

    def _time_lines(self) -> list[str]:
        step = self.time
        if self.hosts is not None and self.hosts.network is None:
            return [
                "The time is not planned: the rate between hosts was not measured. --network GB/s gives it; a run on "
                "several hosts measures it, and keeps it in ~/.cache/truestep/rates."
            ]
        if step is None or self.rates is None:
            among = f" among {self.ranks} ranks" if self.ranks > 1 else ""
            return [
                f"The time is not planned: the rates of the card{among} were not measured.",
                "A run there measures them, and keeps them in ~/.cache/truestep/rates: --card FILE reads them.",
            ]
        width = max(map(len, step.parts))
        lines = [f"{'':<{width}}     seconds"]
        lines += [f"{name:<{width}}{seconds:>12.3f}" for name, seconds in step.parts.items()]
        lines.append(f"{'a step':<{width}}{step.total:>12.3f}")
        return [
            *lines,
            "",
            f"On {self.rates.card}: {step.tokens_per_second:,.0f} tokens/s, {step.tokens:,.0f} tokens a step, "
            f"documents of {self._work.length:,.0f} (--length).",
            *_sharing(self.prompt, step),
            "Sampling, rating and waiting for documents come on top.",
        ]

    def _verdict(self) -> list[str]:
        assert self.memory is not None
        most, memory = self.peak / GIB, self.memory
        if most <= memory:
            lines = [f"It fits {memory:g} GiB: {memory - most:.1f} GiB are left."]
        else:
            lines = [f"It does not fit {memory:g} GiB: {most - memory:.1f} GiB are missing."]
            helpful = savings(self.config, self.shape, self.layout)
            if helpful:
                lines.append("Options that need less, each alone:")
                lines += [f"  {saving.option:<45} {saving.saved / GIB:>7.2f} GiB less" for saving in helpful]
            way = first_that_fits(self.config, self.shape, self.layout, self.memory * GIB * ROOM)
            if way is None:
                lines.append("No combination of options fits: use more GPUs (--ranks, parallel), or a smaller model.")
            else:
                lines += [f"Together these fit, with the same numbers ({way.memory / GIB:.1f} GiB):"]
                lines += [f"  {line}" for line in way.as_yaml()]
        return lines


def make_plan_report(
    config: Config,
    ranks: int,
    memory: float | None,
    output: Path | None,
    rates: Rates | None = None,
    length: float | None = None,
    hosts: Hosts | None = None,
    prompt: SharedPrompt | None = None,
) -> tuple[str, bool]:
    """Return the plan as text, and whether it fits `memory` GiB per rank (True without `memory`). With `output`, also
    write plan.json there."""
    plan = PlanReport.of(config, ranks, memory, rates, length, hosts, prompt)
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        write_whole(output / "plan.json", json.dumps(_values(plan), indent=1).encode())
    return "\n".join(plan.lines()), plan.fits


def _sharing(prompt: SharedPrompt | None, step: StepTime) -> list[str]:
    """Say how much of the tokens is computed where groups share a prompt."""
    if prompt is None:
        return []
    what = f"a prompt of {prompt.tokens:,.0f} that {prompt.group:g} documents share (--prompt)"
    if step.computed == step.tokens:
        return [f"Computed with each document: {what}: sharing is off, or saves no time."]
    return [f"Computed once: {what}: {step.computed:,.0f} tokens, {step.computed / step.tokens:.0%} of the step's."]


def shared_prompt(config: Config, tokens: float | None, group: float | None) -> SharedPrompt | None:
    """Return the prompt that groups share. `group`: None: as `data.group_size` says."""
    if tokens is None:
        if group is not None:
            raise TruestepError("--group is of documents that share a prompt: --prompt says how long it is")
        return None
    group = group or config.data.group_size
    if group is None:
        raise TruestepError("--prompt needs --group: the configuration has no data.group_size")
    return SharedPrompt(tokens, group)


def hosts_of(count: int, gpus: int, network: float | None = None) -> Hosts | None:
    """Return so many hosts of so many GPUs; None for one. `network`: GB/s of a GPU between them; None: as a run
    measured it."""
    if count == 1:
        if network is not None:
            raise TruestepError("--network is of several machines: --hosts says how many there are")
        return None
    if network is not None:
        return Hosts(count, gpus, network * 1e9)
    return Hosts(count, gpus, kept_network(count * gpus, gpus), measured=True)


def exchange_lines(plan: PlanReport, hosts: Hosts) -> list[str]:
    """Say what a rank sends in a step, and what of the plan was measured and what was calculated."""
    found = exchanges(plan.config, plan.shape, plan.layout, plan._work)
    if not found:
        return ["Ranks exchange nothing but a few numbers."]
    width = max(len(volume.what) for volume in found)
    lines = [f"{'':<{width}}   ranks  between hosts   GiB a rank sends"]
    for volume in found:
        crosses = "yes" if volume.crosses(plan.layout, hosts.gpus) else "no"
        lines.append(f"{volume.what:<{width}}{volume.ranks(plan.layout):>8}{crosses:>15}{volume.sent / GIB:>19.3f}")
    step, pipeline = plan.time, plan.layout.every["pipeline"]
    if step is not None and pipeline > 1:
        share = step.parts.get(BUBBLES, 0.0) / step.total
        lines.append(f"Pipeline stages wait {share:.1%} of a step while it fills and empties.")
    lines.append("Calculated: what ranks send, from the model's shape and the layout; the seconds of each part.")
    if plan.rates is not None and hosts.network is not None:
        network = f"{hosts.network / 1e9:g} GB/s of a rank between hosts ({hosts.network_from})"
        lines.append(f"Measured: the rates of {plan.rates.card}, {plan.rates.link / 1e9:g} GB/s of its link in a host.")
        lines.append(f"{'Measured' if hosts.measured else 'Given'}: {network}. Nothing was tried over hosts.")
    return lines


def _title(config: Config, shape: ModelShape, layout: RankLayout) -> list[str]:
    sizes = ", ".join(f"{name} {size}" for name, size in layout.every.items() if size > 1) or "one rank"
    trained = shape.part(0, 1, 1, 1, trained=True).all
    some = f", {trained / 1e6:,.1f} million of them trained" if trained < shape.total else ""
    return [
        f"{config.model.path}: {_many(shape.total)} weights{some}, {config.model.dtype}, {sizes}",
        f"micro-batches of {config.data.tokens_per_microbatch:,} tokens",
    ]


def _many(count: float) -> str:
    return f"{count / 1e9:.2f} billion" if count >= 5e8 else f"{count / 1e6:,.2f} million"


def _table(planned: Sequence[RankMemory]) -> list[str]:
    kinds = [kind for kind in planned[0].kinds if any(rank.kinds.get(kind) for rank in planned)]
    width = max(map(len, kinds))
    several = len(planned) > 1
    heads = [f"stage {rank.stage}" for rank in planned] if several else ["GiB a rank"]
    lines = [" " * width + "".join(f"{head:>12}" for head in heads)]
    for kind in kinds:
        lines.append(f"{kind:<{width}}" + "".join(f"{rank.kinds.get(kind, 0.0) / GIB:>12.2f}" for rank in planned))
    lines.append(f"{'peak of a step':<{width}}" + "".join(f"{rank.total / GIB:>12.2f}" for rank in planned))
    return lines


def _remarks(config: Config, shape: ModelShape, layout: RankLayout) -> list[str]:
    trained = shape.part(0, 1, 1, 1, trained=True)
    staged = staged_bytes(config, shape, layout)
    lines = [
        f"The plan assumes that {LABELS:.0%} of the tokens are labels. The allocator holds a few percent more.",
        f"A rank holds up to {staged / GIB:.1f} GiB of host memory for what it saves, from the first step or save on.",
    ]
    if kept := kept_bytes(config, shape, layout):
        lines.append(
            f"Keepers hold {kept / GIB:.1f} GiB of host memory for each rank (checkpoint.in_memory_every): its state "
            f"twice. On several machines its partner's machine holds {kept / GIB:.1f} GiB too."
        )
    if offloaded(config):
        held = host_bytes(config, shape, trained)
        what = "the optimizer's state" + (" and float32 weights" if masters_offloaded(config) else "")
        lines.append(f"Host memory holds {what}: {held / GIB:.1f} GiB, shared among ranks as weights are.")
    if has_reference(config) and offloads_reference(config):
        held = computed_size(config) * shape.part(0, 1, 1, 1).all / GIB
        lines.append(f"Host memory holds the reference's weights: {held:.1f} GiB, shared among ranks as weights are.")
    if config.sampler is not None and config.sampler.type == "in_process":
        lines.append("The sampler's cache takes what is free while it samples, and gives it back.")
        lines.append("The time of sampling is not planned.")
    return lines


def _values(plan: PlanReport) -> dict[str, Any]:
    step = plan.time
    return {
        "weights": plan.shape.total,
        "layout": plan.layout.every,
        "memory": plan.memory,
        "stages": [{"stage": rank.stage, "bytes": rank.kinds, "total": rank.total} for rank in plan.planned],
        "card": None if plan.rates is None else plan.rates.card,
        "hosts": 1 if plan.hosts is None else plan.hosts.count,
        "sent": {volume.what: volume.sent for volume in exchanges(plan.config, plan.shape, plan.layout, plan._work)},
        "step": None
        if step is None
        else {"seconds": step.parts, "total": step.total, "tokens": step.tokens, "computed": step.computed},
    }
