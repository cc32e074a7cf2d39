"""MLflow and trackio, each read back from its own package: names, values, rollouts, and a run that goes on."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from small_runs import quiet_trainer, read_lines, sampled_config, sort_prompts, word_model, write_lines
from truestep.metrics import trackers
from truestep.metrics.sinks import SAMPLE_COLUMNS, SinkError, numbers_of
from truestep.metrics.trackers import MlflowSink, mlflow_name

CONFIG = {"seed": 0, "loss": {"type": "grpo", "epsilon_low": 0.2}, "data": {"path": ["a", "b"]}}
ROW = {"step": 1, "completion": "<b>answer|1", "reward": 1.0, "truncated": False}


def line(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "documents_seen": 8 * step, "loss": 0.5 / step, "rewards/right": 0.25, **more}


def mlflow_client(directory: Path) -> Any:
    mlflow = pytest.importorskip("mlflow")
    return mlflow.MlflowClient(tracking_uri=f"file:{directory / 'mlruns'}")


@pytest.fixture
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # what the sink sets is put back after the test


@pytest.mark.usefixtures("no_server")
def test_mlflow_has_steps_evaluations_options_and_rollouts_of_one_run(tmp_path: Path) -> None:
    client = mlflow_client(tmp_path)
    first = MlflowSink(tmp_path, CONFIG, experiment="sums", samples_every=10)
    first.step(line(1, grad_norm=math.inf))
    first.rollouts(line(1), [ROW])
    first.step(line(2))
    first.rollouts(line(2), [ROW])
    first.evaluation({"step": 2, "documents_seen": 16, "greedy_reward": 0.5, "pass@4": 0.75, "examples": []})
    first.close()
    second = MlflowSink(tmp_path, CONFIG | {"seed": 1}, experiment="sums", samples_every=10)
    second.step(line(3))
    second.close()
    (run,) = client.search_runs([client.get_experiment_by_name("sums").experiment_id])
    assert run.info.run_name == tmp_path.name and run.info.status == "FINISHED"
    assert run.data.params == {"seed": "0", "loss.type": "grpo", "loss.epsilon_low": "0.2", "data.path": "['a', 'b']"}
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(entry.step, entry.value) for entry in history] == [(1, 0.5), (2, 0.25), (3, 0.5 / 3)]
    assert {"rewards/right", "documents_seen", "evaluation/greedy_reward", "evaluation/pass_at_4"} <= set(
        run.data.metrics
    )
    assert "grad_norm" not in run.data.metrics, "what is not finite is in metrics.jsonl alone"
    (file,) = client.list_artifacts(run.info.run_id, "rollouts")
    table = json.loads(Path(client.download_artifacts(run.info.run_id, file.path, str(tmp_path))).read_text())
    assert file.path == "rollouts/step-00000001.json"
    assert dict(zip(table["columns"], table["data"][0], strict=True)) == dict.fromkeys(SAMPLE_COLUMNS) | ROW


@pytest.mark.usefixtures("no_server")
def test_mlflow_begins_anew_where_the_run_was_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    client = mlflow_client(tmp_path)
    MlflowSink(tmp_path, CONFIG).close()
    (removed,) = (tmp_path / "mlruns").glob(f"*/{(tmp_path / 'mlflow_id').read_text()}")
    shutil.rmtree(removed)
    with caplog.at_level(logging.WARNING):
        again = MlflowSink(tmp_path, CONFIG)
    again.step(line(1))
    again.close()
    assert "does not exist any more; a new one begins" in caplog.text
    (run,) = client.search_runs([client.get_experiment_by_name("truestep").experiment_id])
    assert run.data.metrics["loss"] == 0.5


@pytest.mark.usefixtures("no_server")
def test_mlflow_that_cannot_be_reached_is_named_at_the_start_and_harms_no_run_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    with pytest.raises(SinkError, match=r"logging\.mlflow: http://\*\*\*@127\.0\.0\.1:9: ") as caught:
        MlflowSink(tmp_path, CONFIG, tracking_uri="http://user:hunter2-secret@127.0.0.1:9")
    assert "hunter2" not in str(caught.value)
    monkeypatch.setattr(trackers, "_MOST_WAITING", 3)
    sink = MlflowSink(tmp_path, CONFIG)
    shutil.rmtree(tmp_path / "mlruns")
    with caplog.at_level(logging.WARNING):
        for step in range(1, 50):
            sink.step(line(step))
        sink.close()
    assert caplog.text.count("an entry could not be written, and the run goes on") == 1
    assert "entries did not reach the server; metrics.jsonl has them all" in caplog.text


@pytest.mark.usefixtures("no_server")
def test_a_run_that_goes_on_has_the_names_and_values_of_metrics_jsonl_in_mlflow(tmp_path: Path) -> None:
    client = mlflow_client(tmp_path / "run")
    model, prompts = word_model(tmp_path / "model"), write_lines(tmp_path / "prompts.jsonl", sort_prompts(4))
    for steps in (1, 2):
        options = {"schedule": {"steps": steps}, "logging": {"mlflow": {"name": "mine"}}}
        trainer = quiet_trainer(sampled_config(model, prompts, tmp_path / "run", **options))
        trainer.run()
        for sink in trainer.sinks:
            sink.close()
    (run,) = client.search_runs([client.get_experiment_by_name("truestep").experiment_id])
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2]
    for written in lines:
        for name, value in numbers_of(written).items():
            history = client.get_metric_history(run.info.run_id, mlflow_name(name))
            assert [entry.value for entry in history if entry.step == written["step"]] == [value], name
    assert run.info.run_name == "mine"
    assert run.data.params["model.path"] == str(model)
    assert [file.path for file in client.list_artifacts(run.info.run_id, "rollouts")] == ["rollouts/step-00000001.json"]


@pytest.mark.parametrize(
    ("name", "there"),
    [("pass@4", "pass_at_4"), ("rewards/right", "rewards/right"), ("a(b)=c", "a_b__c"), ("a:b", "a:b")],
)
def test_mlflow_names(name: str, there: str) -> None:
    assert mlflow_name(name) == there


# In a process of its own: trackio keeps its place on the disk in a constant.
TRACKIO_RUN = """
import json, sys
from pathlib import Path
from truestep.metrics.sinks import SinkError
from truestep.metrics.trackers import TrackioSink
from trackio.sqlite_storage import SQLiteStorage

run, other = Path("run"), Path("other")
line = lambda step: {"step": step, "documents_seen": 8 * step, "loss": 0.5 / step, "rewards/right": 0.25}
for steps in ((1, 2), (3,)):  # the second goes on
    sink = TrackioSink(run, {"seed": 0}, project="sums", name="my run", samples_every=10)
    for step in steps:
        sink.step(line(step))
        sink.rollouts(line(step), [{"step": step, "completion": "<b>answer", "reward": 1.0}])
    sink.evaluation({"step": steps[-1], "documents_seen": 16, "greedy_reward": 0.5, "pass@4": 0.75, "examples": []})
    sink.close()
TrackioSink(other, {}, project="sums", name="my run").close()
found = {name: SQLiteStorage.get_logs("sums", name) for name in SQLiteStorage.get_runs("sums")}
try:
    TrackioSink(Path("refused"), {}, project="registry-sums")
except SinkError as error:
    refusal = str(error)
assert not Path("refused").exists()
print("found " + json.dumps([((run / "trackio_name").read_text(), found), refusal]))
"""


def run_trackio(folder: Path) -> Any:
    (folder / "run.py").write_text(TRACKIO_RUN)
    environment = os.environ | {"TRACKIO_DIR": str(folder / "kept"), "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = str(Path(trackers.__file__).parents[2])
    command = [sys.executable, "run.py"]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    (said,) = [line for line in done.stdout.splitlines() if line.startswith("found ")]
    return json.loads(said.removeprefix("found "))


def test_trackio_has_steps_evaluations_and_rollouts_of_one_run(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    (name, found), refusal = run_trackio(tmp_path)
    assert refusal.startswith("logging.trackio: ")
    assert name.startswith("my-run-")
    assert all(known.startswith("my-run-") for known in found), "another run of the same name is another run"
    logs = found[name]
    assert [(entry["step"], entry["loss"]) for entry in logs if "loss" in entry] == [(1, 0.5), (2, 0.25), (3, 0.5 / 3)]
    assert [entry["evaluation/pass@4"] for entry in logs if "evaluation/pass@4" in entry] == [0.75, 0.75]
    (table,) = [entry["rollouts"] for entry in logs if "rollouts" in entry]  # of step 1: then every tenth
    assert table["_value"][0]["completion"] == "<b>answer"
