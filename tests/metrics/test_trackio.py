"""trackio, read back from its own package: names, values, rollouts, and a run that goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from truestep.metrics import sinks

# In a process of its own: trackio keeps its place on the disk in a constant.
TRACKIO_RUN = """
import json, sys
from pathlib import Path
from truestep.metrics.sinks import SinkError, TrackioSink
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
    environment["PYTHONPATH"] = str(Path(sinks.__file__).parents[2])
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
