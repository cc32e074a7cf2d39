"""Makes the observers of a run, in the order in which they are called."""

from collections.abc import Callable, Sequence

from truestep.config.schema import Config
from truestep.metrics.observers import Observer, Observers
from truestep.metrics.sinks import Sink, Sinks
from truestep.model.policy import Policy
from truestep.rollouts.kept.keeper import RecordKeeper
from truestep.rollouts.kept.recorder import RolloutRecorder
from truestep.run.callbacks import Callbacks
from truestep.run.directory import RunDirectory
from truestep.run.weight_lines import WeightLines, made_by
from truestep.text import discard
from truestep.weights.digests import Trace

_SHOWN = 16  # documents of a step that the report shows with `logging.rollouts.documents: all`


def make_observers(
    config: Config,
    directory: RunDirectory,
    policy: Policy,
    sinks: Sequence[Sink],
    callbacks: Callbacks,
    publication: Observer | None,
    say: Callable[[str], None],
    trace: Trace | None,
) -> Observers:
    """Make the observers. The recorder comes before the sinks, which show the kept rollouts; callbacks come before the
    publication of a checkpoint or of the end."""
    recorder = make_recorder(config, directory, policy, say)
    shown = Sinks(sinks) if recorder is None else Sinks(sinks, lambda: recorder.latest)
    lines = None
    if trace is not None:
        begins = policy.weights.ranks.share(directory.has_no_step)
        lines = WeightLines(directory, trace, made_by(config, policy), begins)
    observers = (lines, recorder, make_keeper(config, directory, say), shown, callbacks, publication)
    return Observers([observer for observer in observers if observer is not None])


def make_recorder(
    config: Config, directory: RunDirectory, policy: Policy, say: Callable[[str], None]
) -> RolloutRecorder | None:
    """Make the recorder of rollouts. Without a tokenizer it keeps no text."""
    options, tokenizer = config.logging.rollouts, policy.tokenizer
    if options is None:
        return None

    def decode(ids: Sequence[int], plain: bool) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=plain))

    chosen = options.model_dump() | ({"documents": _SHOWN} if options.documents == "all" else {})
    return RolloutRecorder(
        directory.path,
        **chosen,
        decode=None if tokenizer is None else decode,
        say=say if config.logging.console else discard,
        writes=directory.writes,
        owned=directory.owned,
    )


def keeps_records(config: Config) -> bool:
    """Tell whether the run keeps what `replay` needs: whole records, and digests of documents and weights."""
    return config.logging.rollouts is not None and config.logging.rollouts.documents == "all"


def make_keeper(config: Config, directory: RunDirectory, say: Callable[[str], None]) -> RecordKeeper | None:
    """Make the observer that keeps whole records, if the options ask for them."""
    options = config.logging.rollouts
    if options is None or not keeps_records(config):
        return None
    told = say if config.logging.console else discard
    return RecordKeeper(directory.path, options.gigabytes, told, directory.writes, directory.owned)
