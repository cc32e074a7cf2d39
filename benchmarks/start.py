"""Seconds from typing `truestep train` to the first step: with empty caches of compilers, and again with full ones.

    python benchmarks/start.py [--layers 28 --hidden 2048 --intermediate 6144] [--documents 64] [--again 2]
    python benchmarks/start.py --smollm2 DIRECTORY      # a model with its weights, as `make small-model` makes it
    python benchmarks/start.py --tiny                   # on a CPU: the script itself

Each start is a process of its own, as a user's is, and ends after two steps. The model samples its own documents. A
start prints the lines of the run with the seconds since it was typed. Python keeps its bytecode among the caches, also
where it may not write any beside the sources, as a user's does.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import qwen
import torch
import yaml
from checks import write_task


def start(folder: Path, name: str, caches: Path) -> float:
    """Start a run named `name`; return the seconds until its first step."""
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "XDG_CACHE_HOME": str(caches / "home"),
        "PYTHONPYCACHEPREFIX": str(caches / "bytecode"),
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONUNBUFFERED": "1",
    }
    command = [sys.executable, "-m", "truestep", "train", "run.yaml", f"--checkpoint.directory={folder / name}"]
    print(f"== {name}", flush=True)
    begin, first = time.monotonic(), float("nan")
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            seconds = time.monotonic() - begin
            if line.lstrip().startswith("step 1/") and first != first:
                first = seconds
            print(f"{seconds:6.1f}  {line.rstrip()[:150]}", flush=True)
    if process.returncode:
        raise SystemExit(f"{name} ended with {process.returncode}")
    return first


def write(folder: Path, given: argparse.Namespace) -> None:
    file = write_task(folder, given)
    if given.smollm2:
        config = yaml.safe_load(file.read_text())
        config["model"]["path"] = given.smollm2
        file.write_text(yaml.safe_dump(config))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    qwen.add_shape(parser)
    parser.add_argument("--documents", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=16_384, help="of a micro-batch")
    parser.add_argument("--plain", action="store_true", help="layers that are not compiled")
    parser.add_argument("--smollm2", help="directory of a model with its weights")
    parser.add_argument("--again", type=int, default=2)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    given.steps, given.metrics = 2, "basic"
    given.smollm2 = given.smollm2 and str(Path(given.smollm2).resolve())  # writing the task changes the directory
    if given.tiny or given.smollm2:
        given.layers, given.hidden, given.intermediate, given.vocabulary = 2, 64, 128, 2000
    if given.tiny:
        given.documents, given.new, given.prompt = 16, 16, 8
    here = Path(__file__).resolve().parents[1] / "src"
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(here), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write(folder, given)
        first = start(folder, "first", folder / "caches")
        later = [start(folder, f"again-{number}", folder / "caches") for number in range(1, given.again + 1)]
    kind = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{kind}: first step line after {first:.1f} s; again {', '.join(f'{seconds:.1f}' for seconds in later)} s")


if __name__ == "__main__":
    main()
