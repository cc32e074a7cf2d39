"""Makes a step of a run again, from what the run kept, and says how it compares with the original."""

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from truestep.config.load import load_config
from truestep.config.schema import Config
from truestep.config.yaml_tree import dump
from truestep.ranks.group import Ranks
from truestep.ranks.watch import Watch
from truestep.run.again import Made, Past, ReplayError, blaming, make_again
from truestep.run.assemble.policy import join_ranks
from truestep.tools.replay.compare import named_weights, numerics, rounds
from truestep.tools.replay.differences import (
    BOUND,
    HALF_BOUND,
    Difference,
    by_layer,
    compare_metrics,
    compare_weights,
    table,
)
from truestep.tools.replay.files import Changed, RunFiles, flat

# Options that a replay may change: those that act on documents that are already made.
_MAY_CHANGE = (
    *("model.", "loss.", "optimizer.", "parallel.", "deterministic", "logging.", "data.tokens_per_microbatch"),
    *("data.pad_to_multiple", "data.share_prefixes", "data.zero_advantage", "data.advantage_std_floor"),
    *("schedule.breadth_first_micro_batches", "schedule.stall_timeout"),
)


@dataclass(frozen=True)
class Replay:
    """A step that was made again."""

    step: int
    begins: int
    """The step of the checkpoint that the replay began from; 0: the run's beginning."""
    changed: tuple[str, ...]
    """The options that were changed, which make it a "what if"."""
    exact: bool
    """True if the weights, and all metrics that the run kept, are the original's bit for bit."""
    lawful: bool
    """True if the first step that was made again differs from the original by rounding alone. If nothing is known that
    changes rounding (layout, machine, versions, no `deterministic: true`): True if the step is exact."""
    metrics: dict[str, Any]
    """The step's line of metrics, made again."""
    said: tuple[str, ...]
    """The verdict."""
    differences: tuple[str, ...]
    """The table of differences."""
    grown: tuple[str, ...]
    """The layers whose gradient grew most since the step before."""

    @property
    def lines(self) -> tuple[str, ...]:
        return (*self.said, *self.differences, *self.grown)

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


@dataclass(frozen=True)
class Again:
    """A step that is about to be made again."""

    past: Past
    original: Config
    config: Config
    folder: Path
    ranks: Ranks
    made: Made

    @property
    def changed(self) -> bool:
        """True if options were changed that change results."""
        return bool(Changed.of(flat(self.original.model_dump()), flat(self.config.model_dump())).of_numbers)

    def run(self) -> Replay:
        """Make the step, and compare it with the original. Every rank calls this."""
        trainer = self.made.trainer
        with blaming(self.past, self.made.damage):
            trainer.run()
        if not trainer.finished:
            raise KeyboardInterrupt
        return self.ranks.share(lambda: _judge(self.past, self.made, self.original, self.config, self.folder))


def replay(run: Path, step: int, output: Path | None = None, overrides: Sequence[str] = ()) -> Replay:
    """Make a step again. Its files (metrics, ledger, digests) are written to `output`, if given. Every rank calls
    this."""
    with making_again(run, step, output, overrides) as again:
        return again.run()


@contextmanager
def making_again(run: Path, step: int, output: Path | None, overrides: Sequence[str]) -> Iterator[Again]:
    """Yield a step that is about to be made again. Every rank calls this."""
    past = Past.of(run, step)
    original = load_config(past.directory.options_of(step))
    ranks = join_ranks(_changed(past, original, overrides))
    watch = Watch(ranks, original.schedule.stall_timeout)
    with _folder(output, ranks) as folder, watch.watching():
        config = _changed(past, original, overrides)
        yield Again(past, original, config, folder, ranks, make_again(past, original, config, folder, ranks, watch))


@contextmanager
def _folder(output: Path | None, ranks: Ranks) -> Iterator[Path]:
    """Yield the directory of the replay's files: a new or empty one, or one that is removed afterwards."""
    if output is None:
        with tempfile.TemporaryDirectory(prefix="replay-") as temporary:
            yield Path(temporary)
        return
    if ranks.share(lambda: output.exists() and any(output.iterdir())):
        raise ReplayError(f"--output {output} is not empty: name a new directory")
    ranks.share(lambda: output.mkdir(parents=True, exist_ok=True))
    try:
        yield output
    except BaseException:  # remove incomplete output, so that the same directory can be given again
        if ranks.first:
            for path in output.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        raise


def _changed(past: Past, original: Config, overrides: Sequence[str]) -> Config:
    """Return the options of the replay. If a section's `type` is changed, its other options keep only values that
    differ from the defaults."""
    if not overrides:
        return original
    options = original.model_dump()
    given = original.model_dump(exclude_defaults=True)
    for section in ("loss", "optimizer"):
        if any(word.startswith(f"--{section}.type") for word in overrides):
            options[section] = {**given.get(section, {}), "type": options[section]["type"]}
            options[section] = _known(section, options[section], overrides)
    with tempfile.TemporaryDirectory(prefix="replay-") as folder:
        file = Path(folder) / past.directory.config.name
        file.write_text(dump(options), encoding="utf-8")
        config = load_config(file, list(overrides))
    here, before = flat(config.model_dump()), flat(original.model_dump())
    for name in dict.fromkeys((*here, *before)):
        if here.get(name) != before.get(name) and not name.startswith(_MAY_CHANGE):
            raise ReplayError(
                f"{name} cannot be changed: a replay trains on the step's documents as they were. "
                f"What may be changed: {', '.join(_MAY_CHANGE)}"
            )
    return config


def _known(section: str, options: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return those options of a section that its new type also has."""
    from truestep.config.describe import options as all_options

    named = iter(overrides)
    new = next((word.partition("=")[2] or next(named, "")) for word in named if word.startswith(f"--{section}.type"))
    known = all_options()
    kept = {}
    for name, value in options.items():
        found = known.get(f"{section}.{name}")
        variants = None if found is None else found.variants
        if name == "type" or not variants or new in variants:
            kept[name] = value
    return kept


def _judge(past: Past, made: Made, original: Config, config: Config, folder: Path) -> Replay:
    """Compare what was made again with the original."""
    was, now = RunFiles(past.directory.path), RunFiles(folder)
    changed = Changed.of(flat(original.model_dump()), flat(config.model_dump()))
    first = past.begins + 1
    metrics, compared = compare_metrics(was.metrics.get(past.step, {}), now.metrics[past.step])
    weights = compare_weights(was.weights.get(past.step), now.weights.get(past.step))
    exact = not metrics and weights is not None and weights.same
    made_by = [dict(line.made_by) if (line := run.weights.get(past.step)) else {} for run in (was, now)]
    unexplained = not (exact or rounds(changed, *made_by) or changed.of_numbers)
    bound = BOUND.get(config.model.dtype, HALF_BOUND)
    beyond = _beyond(past, was, now, bound)
    lines = _at_the_beginning(past, made, was, config)
    if made.damage is not None:
        lines.append(f"{past.checkpoint} is damaged: {made.damage}")
    damaged = bool(lines)
    if was.weights and past.begins not in was.weights:
        what = "its first weights" if past.checkpoint is None else f"the weights after step {past.begins}"
        lines.append(f"the run noted no digest of {what}, so those that the replay began with were not checked")
    if len(past.steps) > 1:
        lines.append(f"steps {first} to {past.step} were made again, from {past.checkpoint or 'the first weights'}")
    if changed.of_numbers:
        lines.append(f"what if: {_what_if(changed)}")
        lines.append(f"step {past.step}: {len(metrics)} of {compared} metrics differ" + _weights_said(weights))
    elif exact and weights is not None:
        bits = f"the bits of {weights.compared} weights"
        known = f"{compared} metrics, and {bits}" if compared else f"{bits}; the run kept no metrics (logging.jsonl)"
        lines.append(f"step {past.step} is what it was, bit for bit: {known}")
    else:
        lines += _not_exact(past, beyond, bound, compared, metrics, _weights_said(weights), unexplained)
        lines.append(numerics(changed, *made_by))
    return Replay(
        past.step,
        past.begins,
        tuple(changed.of_numbers),
        exact,
        not (beyond[1] or damaged or unexplained) and (exact or compared > 0),
        dict(now.metrics[past.step]),
        tuple(lines),
        tuple(table([*metrics, *([] if weights is None else weights.norms)], ("original", "replay"))),
        tuple(_beside_the_step_before(past.step, now, was)),
    )


def _beyond(past: Past, was: RunFiles, now: RunFiles, bound: float) -> tuple[int, list[Difference]]:
    """Return the first step that differs by more than rounding, and the metrics that do. The first step that was made
    again is judged, and the step itself if the weights before it have the original's bits."""
    judged = [past.begins + 1]
    before = compare_weights(was.weights.get(past.step - 1), now.weights.get(past.step - 1))
    if past.step > judged[0] and before is not None and before.compared and not before.weights:
        judged.append(past.step)
    for step in judged:
        found, _ = compare_metrics(was.metrics.get(step, {}), now.metrics[step])
        if beyond := [one for one in found if not one.size <= bound]:
            return step, beyond
    return judged[-1], []


def _what_if(changed: Changed) -> str:
    """Describe the changed options. If a section's type was changed, only its type is named."""
    types = [name for name in changed.of_numbers if name.endswith(".type")]
    sections = tuple(name.removesuffix("type") for name in types)
    others = [name for name in changed.of_numbers if not name.startswith(sections)] if sections else changed.of_numbers
    said = [(name, *changed.all[name]) for name in (*types, *others)]
    return "; ".join(f"{name} is {now} (it was {before})" for name, before, now in said)


def _at_the_beginning(past: Past, made: Made, was: RunFiles, config: Config) -> list[str]:
    """Compare the weights that the replay begins with to those that the run noted: after the checkpoint's step, or at
    its beginning."""
    line = was.weights.get(past.begins)
    if line is None or line.made_by.get("digests_of") != made.digests_of:
        return []
    noted = line.measured.digests
    odd = [name for name, digest in made.digests.items() if noted.get(name, digest) != digest]
    if not odd:
        return []
    more = f" and {len(odd) - 5} more" if len(odd) > 5 else ""
    which = (
        f"the first weights (model.path: {config.model.path}) are not those that the run began with"
        if past.checkpoint is None
        else f"the weights of {past.checkpoint} are not those that step {past.begins} left"
    )
    return [f"{which}: the bits of {', '.join(odd[:5])}{more} differ"]


def _beside_the_step_before(step: int, made: RunFiles, was: RunFiles) -> list[str]:
    """Show the layers whose gradient grew most since the step before, because a jump may come from them."""
    this, before = made.weights.get(step), made.weights.get(step - 1) or was.weights.get(step - 1)
    if this is None or before is None:
        return []
    norms, others = by_layer(this.measured.gradient_norms), by_layer(before.measured.gradient_norms)
    grown = [Difference(f"{layer} gradient norm", others[layer], norms[layer]) for layer in norms if layer in others]
    grown.sort(key=lambda one: -one.second / max(one.first, 1e-30))
    return [
        f"the gradients that grew most since step {step - 1}:",
        *table(grown[:3], (f"step {step - 1}", f"step {step}")),
    ]


def _weights_said(weights: Any) -> str:
    if weights is None:
        return "; the run noted no digests of its weights"
    if not weights.compared:
        return "; no bits of weights were compared"
    return f"; the bits of {named_weights(weights)} differ" if weights.weights else "; no weight differs"


def _not_exact(
    past: Past,
    judged: tuple[int, list[Difference]],
    bound: float,
    compared: int,
    metrics: list[Difference],
    weights: str,
    unexplained: bool,
) -> list[str]:
    if not compared:
        return [f"step {past.step} was made again; the run kept no metrics to compare it with (logging.jsonl){weights}"]
    largest = f", by at most {metrics[0].size:.1e} ({metrics[0].name})" if metrics else ""
    differs = f"{len(metrics)} of {compared} metrics differ{largest}{weights}"
    step, beyond = judged
    if beyond:
        where = f"step {step}, the first that was made again," if step == past.begins + 1 else f"step {step}"
        return [
            f"step {past.step} is not what it was: in {where} {beyond[0].name} differs by {beyond[0].size:.1e}, more "
            f"than rounding makes ({bound:g}). {differs}"
        ]
    if unexplained:
        return [f"step {past.step} is not what it was, bit for bit: {differs}."]
    if step == past.step or not metrics or metrics[0].size <= bound:
        return [f"step {past.step} is what it was, but for rounding: {differs}."]
    return [
        f"step {step} is what it was, but for rounding. Step {past.step} was not judged, as the weights before it "
        f"differ, and rounding differences grow over steps: {differs}. A checkpoint just before it would tell"
    ]
