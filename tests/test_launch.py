"""The recipes for several machines: each is run, with a torchrun that writes down what it was called with."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

from pages import ROOT, all_pages, refused, shell_commands
from small_runs import write_rollouts
from truestep.files.whole import read_json_lines

LAUNCH = ROOT / "examples" / "launch"
# What the schedulers set on the second of two machines with eight GPUs each.
SLURM = {
    "SLURM_JOB_NODELIST": "node[7-8]",
    "SLURM_NNODES": "2",
    "SLURM_GPUS_ON_NODE": "8",
    "SLURM_CPUS_PER_TASK": "64",
    "SLURM_JOB_ID": "4711",
}
SKY = {
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    "CONFIG": "/shared/config.yaml",
}


def read(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((LAUNCH / name).read_text(encoding="utf-8")))


def job() -> dict[str, Any]:
    return read("kubernetes.yaml")[1]


def started(tmp_path: Path, script: str, environment: dict[str, str], *arguments: str) -> list[str]:
    """Run a shell script with stand-ins for the scheduler's programs; give the arguments that torchrun gets."""
    for name, text in (
        ("srun", 'shift\nexec "$@"'),  # the one option of its own, and then the command
        ("scontrol", 'test "$*" = "show hostnames node[7-8]" && printf "node7\\nnode8\\n"'),
        ("torchrun", f"exec {sys.executable} -c 'import json, sys; print(json.dumps(sys.argv[1:]))' \"$@\""),
    ):
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", script, "recipe", *arguments],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


def checked(arguments: list[str]) -> dict[str, Any]:
    """Parse the arguments as torchrun does, and what stands behind them as truestep does."""
    parsed = vars(get_args_parser().parse_args(arguments))
    assert parsed["module"] and parsed["training_script"] == "truestep"
    assert refused(parsed["training_script_args"]) is None
    return parsed


def test_slurm(tmp_path: Path) -> None:
    script = (LAUNCH / "slurm.sh").read_text(encoding="utf-8")
    called = checked(started(tmp_path, script, SLURM, "/shared/config.yaml"))
    assert (called["nnodes"], called["nproc_per_node"], called["rdzv_id"]) == ("2", "8", "4711")
    assert (called["rdzv_backend"], called["rdzv_endpoint"]) == ("c10d", "node7:29500")
    assert called["training_script_args"] == ["train", "/shared/config.yaml"]
    asked = dict(
        line.removeprefix("#SBATCH --").split("=", 1)
        for line in script.splitlines()
        if line.startswith("#SBATCH") and "=" in line
    )
    assert (asked["nodes"], asked["gpus-per-node"], asked["ntasks-per-node"]) == ("2", "8", "1")
    # SLURM stops reading its options at the first command.
    assert script.rindex("#SBATCH") < script.index("set -euo")
    # torchrun gives up on its processes before SLURM gives up on torchrun.
    assert int(asked["signal"].removeprefix("TERM@")) > int(
        script.split("TORCH_ELASTIC_SHUTDOWN_TIMEOUT=")[1].split()[0]
    )


def test_kubernetes(tmp_path: Path) -> None:
    service, spec = read("kubernetes.yaml")[0], job()["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"] == ["bash", "-c"]
    called = checked(started(tmp_path, container["args"][0], {"JOB_COMPLETION_INDEX": "1"}))
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == int(called["nnodes"])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(called["nproc_per_node"])
    assert called["node_rank"] == 1
    # The first pod's name is made of the job's name, its number and the service's name.
    assert called["master_addr"] == f"{job()['metadata']['name']}-0.{pod['subdomain']}"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["selector"] == {
        "job-name": job()["metadata"]["name"]
    }
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounted.keys() == {volume["name"] for volume in pod["volumes"]}
    assert called["training_script_args"][1].startswith(mounted["shared"])
    wait = next(int(entry["value"]) for entry in container["env"] if entry["name"] == "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    assert wait < pod["terminationGracePeriodSeconds"]


def test_skypilot(tmp_path: Path) -> None:
    (task,) = read("sky.yaml")
    called = checked(started(tmp_path, task["run"], SKY))
    assert (called["nnodes"], called["nproc_per_node"], called["node_rank"]) == ("2", "8", 1)
    assert called["master_addr"] == "10.0.0.1"
    assert called["training_script_args"] == ["train", "/shared/config.yaml"]
    assert task["envs"]["CONFIG"].startswith(next(iter(task["volumes"])))
    subprocess.run(["bash", "-n", "-c", task["setup"]], check=True)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("--rdzv-endpoint", "--rdzv-adress"), ("truestep train", "truestep trian"), ("-m truestep", "truestep")],
)
def test_a_wrong_recipe_is_found(right: str, wrong: str, tmp_path: Path) -> None:
    script = (LAUNCH / "slurm.sh").read_text(encoding="utf-8")
    assert right in script
    with pytest.raises((AssertionError, SystemExit)):
        checked(started(tmp_path, script.replace(right, wrong), SLURM, "/shared/config.yaml"))


def torchrun_lines() -> list[list[str]]:
    """Collect the calls of torchrun in the code blocks of all pages."""
    commands = [words for page in all_pages() for block in page.of("bash") for words in shell_commands(block.text)]
    return [words[1:] for words in commands if words[:1] == ["torchrun"]]


def test_every_torchrun_of_the_pages_parses() -> None:
    assert len(torchrun_lines()) >= 6
    for words in torchrun_lines():
        checked(words)


@pytest.mark.parametrize(
    "rendezvous", [pytest.param("c10d", marks=pytest.mark.long), pytest.param("static", marks=pytest.mark.release)]
)
def test_two_machines_make_the_steps_of_one(rendezvous: str, tmp_path: Path, tiny_model: Callable[[str], Path]) -> None:
    """Both ways to start by hand, as the page has them, with two launchers that know of each other by an address."""
    write_rollouts(tmp_path / "r.jsonl", 10)
    config = {
        "model": {"path": str(tiny_model("llama")), "dtype": "float32", "device": "cpu"},
        "data": {"path": "r.jsonl", "advantages": "none", "tokens_per_microbatch": 40},
        "schedule": {"docs_per_step": 5},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    alone = [sys.executable, "-m", "truestep", "train", "config.yaml", "--checkpoint.directory", "alone"]
    subprocess.run(alone, cwd=tmp_path, check=True, timeout=300)
    option = {"c10d": "--rdzv-id", "static": "--node-rank"}[rendezvous]
    (words,) = (words for words in torchrun_lines() if option in words)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    here = {"8": "1", "first-machine:29500": f"127.0.0.1:{port}", "first-machine": "127.0.0.1", "29500": port}
    machines = []
    for number in ("0", "1"):
        command = [
            here.get(word, number if before == "--node-rank" else word)
            for before, word in zip(["", *words], words, strict=False)
        ]
        launcher = [sys.executable, "-m", "torch.distributed.run", "--local-addr", "127.0.0.1", *command]
        machines.append(subprocess.Popen([*launcher, "--checkpoint.directory", "both"], cwd=tmp_path))
    try:
        assert [machine.wait(timeout=300) for machine in machines] == [0, 0]
    finally:
        for machine in machines:
            machine.kill()
    one, two = (read_json_lines(tmp_path / run / "metrics.jsonl") for run in ("alone", "both"))
    assert [line["loss"] for line in two] == pytest.approx([line["loss"] for line in one], rel=1e-5)
    assert [line["grad_norm"] for line in two] == pytest.approx([line["grad_norm"] for line in one], rel=1e-5)
