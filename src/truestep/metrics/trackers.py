"""Two sinks of a run's numbers and rollouts: MLflow and trackio. A start that goes on continues the same run there.

A server that cannot be reached while the run goes on costs that run's lines there and nothing else.
"""

import logging
import math
import os
import queue
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from truestep.files import write_whole
from truestep.metrics.sinks import SAMPLE_COLUMNS, Samples, SinkError, numbers_of, stored_name
from truestep.text import printable

log = logging.getLogger(__name__)

_MOST_WAITING = 1000  # lines that wait for a slow server; those beyond it are dropped
_PATIENCE = 60.0  # seconds that a server has at the end to take what is left
_MOST_PARAMETERS = 100  # that MLflow takes at a time
_LONGEST_VALUE = 500


class MlflowSink:
    """A run at MLflow. Every `samples_every` steps it gets a table of rollouts as an artifact."""

    def __init__(
        self,
        directory: Path,
        config: Mapping[str, Any],
        *,
        experiment: str = "truestep",
        name: str | None = None,
        tracking_uri: str | None = None,
        samples_every: int = 0,
    ):
        try:
            import mlflow
        except ImportError as error:
            raise SinkError("logging.mlflow needs `pip install 'truestep[mlflow]'`") from error
        uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or f"file:{(directory / 'mlruns').resolve()}"
        if uri.startswith("file:") or "://" not in uri:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # which it asks for since version 3.7
        id_file = directory / "mlflow_id"
        try:
            self._client = mlflow.MlflowClient(tracking_uri=uri)
            self._run_id = self._begin(stored_name(id_file), experiment, name or directory.name, config)
        except Exception as error:  # its own, those of requests, and those of the server
            raise SinkError(f"logging.mlflow: {printable(uri)}: {printable(error, 500)}") from error
        write_whole(id_file, self._run_id.encode())
        self._metric, self._samples = mlflow.entities.Metric, Samples(samples_every)
        self._worker = _Worker("logging.mlflow")

    def _begin(self, known: str | None, experiment: str, name: str, config: Mapping[str, Any]) -> str:
        """Go on with the run of an earlier start, or begin one; return its id."""
        from mlflow.entities import Param

        run = None
        if known is not None:
            try:
                run = self._client.get_run(known)
                self._client.set_terminated(known, "RUNNING")
            except Exception as error:  # it was removed there, or this is another server
                log.warning("logging.mlflow: the run %s does not exist any more; a new one begins: %s", known, error)
                run = None
        if run is None:
            found = self._client.get_experiment_by_name(experiment)
            number = self._client.create_experiment(experiment) if found is None else found.experiment_id
            run = self._client.create_run(number, run_name=name)
        there = run.data.params  # it does not let a parameter be changed
        params = [Param(key, value) for key, value in _flat(config) if key not in there]
        for start in range(0, len(params), _MOST_PARAMETERS):
            self._client.log_batch(run.info.run_id, params=params[start : start + _MOST_PARAMETERS])
        return str(run.info.run_id)

    def step(self, line: Mapping[str, Any]) -> None:
        self._log(numbers_of(line), line["step"])

    def evaluation(self, line: Mapping[str, Any]) -> None:
        self._log({f"evaluation/{name}": value for name, value in numbers_of(line).items()}, line["step"])

    def rollouts(self, line: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
        if data := self._samples.of(line, rows):
            columns = {name: [row[place] for row in data] for place, name in enumerate(SAMPLE_COLUMNS)}
            file = f"rollouts/step-{line['step']:08d}.json"
            self._worker.do(lambda: self._client.log_table(self._run_id, columns, file))

    def close(self) -> None:
        self._worker.do(lambda: self._client.set_terminated(self._run_id))
        self._worker.close()

    def _log(self, numbers: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        metrics = [
            self._metric(mlflow_name(name), float(value), now, step)
            for name, value in numbers.items()
            if math.isfinite(value)
        ]
        self._worker.do(lambda: self._client.log_batch(self._run_id, metrics=metrics))


def mlflow_name(name: str) -> str:
    """Give a metric's name at MLflow, which takes no @ and few other signs: pass@4 is pass_at_4."""
    return re.sub(r"[^\w.\- :/]", "_", name.replace("@", "_at_"))


def _flat(options: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", printable(value, _LONGEST_VALUE)


class _Worker:
    """One thread that talks to a server, so that a step waits for none."""

    def __init__(self, name: str):
        self._name, self._failures, self._dropped = name, 0, 0
        self._waiting: queue.Queue[Callable[[], object] | None] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._work, daemon=True, name=name)
        self._thread.start()

    def do(self, call: Callable[[], object]) -> None:
        try:
            self._waiting.put_nowait(call)
        except queue.Full:
            self._dropped += 1

    def close(self) -> None:
        """Wait for what was asked for, but not for ever."""
        try:
            self._waiting.put(None, timeout=_PATIENCE)
        except queue.Full:
            self._dropped += 1
        self._thread.join(_PATIENCE)
        lost = self._failures + self._dropped
        if lost or self._thread.is_alive():
            log.warning("%s: %d entries did not reach the server; metrics.jsonl has them all", self._name, lost)

    def _work(self) -> None:
        while (call := self._waiting.get()) is not None:
            try:
                call()
            except Exception as error:  # a server's, a connection's: the run goes on
                self._failures += 1
                if self._failures == 1:
                    log.warning("%s: an entry could not be written, and the run goes on: %s", self._name, error)


class TrackioSink:
    """A run of trackio, on this machine or in a Space. It logs by optimizer steps."""

    def __init__(
        self,
        directory: Path,
        config: Mapping[str, Any],
        *,
        project: str,
        name: str | None = None,
        space: str | None = None,
        samples_every: int = 0,
    ):
        try:
            import trackio
        except ImportError as error:
            raise SinkError("logging.trackio needs `pip install 'truestep[trackio]'`") from error
        # A name is all that it goes on by, so no two runs may have the same.
        name_file = directory / "trackio_name"
        known = stored_name(name_file)
        readable = re.sub(r"[^\w-]", "-", name or directory.name, flags=re.ASCII)[:64]
        unique = known or f"{readable}-{uuid.uuid4().hex[:6]}"
        try:
            self._run = trackio.init(
                project=project,
                name=unique,
                space_id=space,
                config=dict(config),
                resume="allow" if known else "never",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        except Exception as error:  # its own, those of the hub, and of a project's name
            raise SinkError(f"logging.trackio: {printable(error, 500)}") from error
        write_whole(name_file, unique.encode())
        self._samples, self._table = Samples(samples_every), trackio.Table

    def step(self, line: Mapping[str, Any]) -> None:
        self._run.log(numbers_of(line), step=line["step"])

    def evaluation(self, line: Mapping[str, Any]) -> None:
        numbers = {f"evaluation/{name}": value for name, value in numbers_of(line).items()}
        self._run.log(numbers, step=line["step"])

    def rollouts(self, line: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
        if data := self._samples.of(line, rows):
            self._run.log({"rollouts": self._table(columns=list(SAMPLE_COLUMNS), data=data)}, step=line["step"])

    def close(self) -> None:
        self._run.finish()
