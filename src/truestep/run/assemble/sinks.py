"""Makes the sinks of a run's metrics."""

from truestep.config.custom import load_custom
from truestep.config.schema import Config
from truestep.files.whole import read_json_lines
from truestep.metrics.sinks import JsonLines, Sink, TensorBoardSink, TrackioSink, WandbSink
from truestep.report.verdicts.watching import Watching
from truestep.run.directory import RunDirectory
from truestep.run.terminal.display import Display
from truestep.run.terminal.run import ConsoleSink
from truestep.text import discard, redacted_options


def make_sinks(config: Config, directory: RunDirectory, display: Display, title: str, done: int) -> list[Sink]:
    """Make the sinks that the options ask for. `done` steps were made before this start."""
    logging = config.logging
    sinks: list[Sink] = []
    if logging.jsonl:
        sinks.append(JsonLines(directory.metrics, directory.check_owner))
    if logging.tensorboard is not None:
        sinks.append(TensorBoardSink(logging.tensorboard, done))
    options = redacted_options(config.model_dump(mode="json"))
    for chosen, tracker in (
        (logging.wandb, WandbSink),
        (logging.trackio, TrackioSink),
    ):
        if chosen is not None:
            sinks.append(tracker(directory.path, options, **chosen.model_dump()))
    for name in logging.custom_sinks or ():
        directory.path.mkdir(parents=True, exist_ok=True)
        sinks.append(load_custom("logging.custom_sinks", name)(directory.path, options, done))
    if logging.console:
        sets = list((config.evaluation and config.evaluation.sets) or ())
        sinks.append(ConsoleSink(display, steps=config.schedule.steps, done=done, title=title, sets=sets))
    return sinks


def make_watching(config: Config, directory: RunDirectory, display: Display) -> Watching:
    """Make the sink that judges the run at each step. It also reads the lines of earlier starts."""
    return Watching(
        display.say if config.logging.console else discard,
        directory.record_warning,
        rejected_in=str(directory.rejected),
        pass_reward=config.evaluation.pass_reward if config.evaluation else None,
        updates=config.schedule.updates_per_batch,
        steps=read_json_lines(directory.metrics),
        evaluations=read_json_lines(directory.evaluations),
        warnings=read_json_lines(directory.warnings),
    )
