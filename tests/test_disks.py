"""Disks that refuse: each command ends in one sentence that names the file and the disk, and goes on with more room.

The disks are real: a tmpfs of some bytes that only the command sees.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import resource
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from disks import READ_ONLY, can_mount, on_disk
from selection import in_tiers, long_except
from small_runs import (
    file_config,
    quiet_trainer,
    read_lines,
    tokenised_model,
    type_command,
    without_times,
    write_rollouts,
)
from truestep.commands.cli import main
from truestep.config.load import dump_config
from truestep.config.schema import Config
from truestep.errors import TruestepError
from truestep.files.disks import DiskError, no_file, writing
from truestep.files.whole import append_json_line, write_whole
from truestep.model.loading.load import load_policy
from truestep.report.runs import read_run

PLENTY = 1 << 26
FULL = "the disk is full (No space left on device); of the "


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, rollouts, a finished run, and the configuration of a run on the small disk."""
    if not can_mount():
        pytest.skip("this machine lets no process mount a disk of its own")
    base = tmp_path_factory.mktemp("disks")
    tokenised_model(base / "model", "llama")
    write_rollouts(base / "r.jsonl", 40)
    (base / "good.yaml").write_text(dump_config(config(base, base / "good", 0)))
    quiet_trainer(config(base, base / "good", 0)).run()
    (base / "small.yaml").write_text(dump_config(config(base, base / "disk/run", 2)))
    return base


def config(base: Path, run: Path, every: int) -> Config:
    return file_config(base / "model", base / "r.jsonl", run, checkpoint={"every": every, "keep": 2})


def refused(ended: dict[str, Any], reason: str) -> str:
    """The one line that a command ended with."""
    assert ended["code"] == 1, ended["said"]
    assert "Traceback" not in ended["said"]
    (line,) = [line for line in ended["said"].splitlines() if line.startswith("error: ")]
    assert line.endswith("start the same command again: complete files are unchanged") and reason in line
    return line


# Bytes of the disk, and what the first file is that has no room there.
RUNS = {
    4096: "run/config.yaml",
    8192: "run/ledger.jsonl",
    16384: "run/metrics.jsonl",
    65536: "run/",  # whichever thread comes first: a checkpoint's, or that of the steps
    300_000: "run/",
    602_112: "run/",
    800_000: "run/",
}


@pytest.mark.parametrize("size", long_except(RUNS, 8192, 65536))
def test_a_run_on_a_full_disk_says_so_and_goes_on_when_there_is_room(size: int, base: Path, tmp_path: Path) -> None:
    typed = ["train", str(base / "small.yaml")]
    full, roomy = on_disk(base / "disk", [(size, typed), (PLENTY, typed)], tmp_path / "results")
    assert f"error: {base / 'disk' / RUNS[size]}" in refused(full, FULL)
    assert roomy["code"] == 0, roomy["said"]
    assert roomy["files"]["run/ledger.jsonl"] == (base / "good/ledger.jsonl").read_text()
    lines = [json.loads(line) for line in roomy["files"]["run/metrics.jsonl"].splitlines()]
    assert without_times(lines) == without_times(read_lines(base / "good/metrics.jsonl")), "bit for bit"


COMMANDS: dict[str, tuple[int, list[str], str]] = {
    "score": (8192, ["score", "good.yaml", "--output", "disk/out"], "disk/out/scores.jsonl"),
    "gradients": (65536, ["score", "good.yaml", "--output", "disk/out", "--gradients"], "disk/out/.gradients"),
    "export": (16384, ["export", "good", "--output", "disk/out"], "disk/.out."),
    "the export's files": (4096, ["export", "good", "--output", "disk/out"], "disk/.out."),
    "report": (16384, ["report", "good", "--output", "disk/page.html"], "disk/page.html"),
    "init": (65536, ["init", "disk/task"], "disk/task/model"),
    "demo": (8192, ["demo", "--output", "disk/demo"], "disk/demo/model"),
    "parity": (8192, ["parity", "good.yaml", "--output", "disk/out"], "disk/out/parity.svg"),
    "verify": (8192, ["verify", "good.yaml", "--output", "disk/out", "--ranks", "1"], "disk/out/"),
}


@pytest.mark.parametrize("name", in_tiers(COMMANDS, ["score", "report"], set(COMMANDS) - {"score", "report", "verify"}))
def test_every_command_names_the_file_that_has_no_room(name: str, base: Path, tmp_path: Path) -> None:
    size, typed, file = COMMANDS[name]
    arguments = [str(base / word) if word.startswith(("good", "disk")) else word for word in typed]
    (ended,) = on_disk(base / "disk", [(size, arguments)], tmp_path / "results")
    assert refused(ended, FULL).startswith(f"error: {base / file}")


@pytest.mark.long
def test_a_disk_that_became_read_only_is_named(base: Path, tmp_path: Path) -> None:
    typed = ["train", str(base / "small.yaml"), "--schedule.steps"]
    rounds = [(PLENTY, [*typed, "3"]), (PLENTY, [*typed, "5"], READ_ONLY), (PLENTY, [*typed, "5"])]
    made, still, goes_on = on_disk(base / "disk", rounds, tmp_path / "results")
    assert made["code"] == goes_on["code"] == 0, goes_on["said"]
    assert still["code"] == 1 and "ead-only file system" in still["said"] and str(base / "disk/run") in still["said"]
    assert still["files"] == made["files"]
    assert goes_on["files"]["run/ledger.jsonl"].count("\n") == 5


def test_a_file_that_may_grow_no_further_is_named(tmp_path: Path) -> None:
    """Of the process's own limit, which needs no disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(DiskError, match=rf"^{tmp_path}/w cannot be written: .*ulimit -f") as caught:
            write_whole(tmp_path / "w", b"x" * 2000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir()), "nothing is left of it"
    assert caught.value.errno == errno.EFBIG
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value), "as other ranks raise it"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE])
def test_what_a_library_raises_gets_the_file_s_name(number: int, tmp_path: Path) -> None:
    """Whether it has a number, as Python's own calls have, or a text, as libraries in Rust do."""
    for error in (
        OSError(number, os.strerror(number)),
        Exception(f"I/O error: {os.strerror(number)} (os error {number})"),
    ):
        with (
            pytest.raises(DiskError, match=rf"^{tmp_path}/file cannot be written: ") as caught,
            writing(tmp_path / "file"),
        ):
            raise error
        assert os.strerror(number) in str(caught.value)
    with pytest.raises(FileNotFoundError), writing(tmp_path):
        raise FileNotFoundError(errno.ENOENT, "no such file", "x")


def test_a_device_that_is_full_is_named(tmp_path: Path) -> None:
    (tmp_path / "lines.jsonl").symlink_to("/dev/full")
    with pytest.raises(DiskError, match=r"lines.jsonl cannot be written: the disk is full"):
        append_json_line(tmp_path / "lines.jsonl", {"a": 1})


@pytest.mark.long
def test_a_console_on_a_full_disk_ends_the_command_with_a_code(base: Path, tmp_path: Path) -> None:
    process = type_command(["plan", str(base / "good.yaml")], Path("/dev/full"))
    process.join(100)
    assert process.exitcode not in (0, None)


@pytest.fixture
def special(tmp_path: Path) -> Iterator[Callable[[str, str], Path]]:
    """Things in the file system that are no files."""
    kept: list[socket.socket] = []

    def make(kind: str, name: str) -> Path:
        path = tmp_path / name
        if kind == "a named pipe":
            os.mkfifo(path)
        elif kind == "a socket":
            kept.append(socket.socket(socket.AF_UNIX))
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(tmp_path)
                kept[-1].bind(name)
        else:
            path.symlink_to("/dev/zero")
        return path

    yield make
    for one in kept:
        one.close()


@pytest.mark.parametrize("kind", ["a named pipe", "a socket", "a device"])
def test_what_is_no_file_is_refused_before_it_is_opened(
    kind: str, special: Callable[[str, str], Path], tmp_path: Path
) -> None:
    """A named pipe that nobody writes to would be waited for without end."""
    records, yaml = special(kind, "r.jsonl"), special(kind, "c.yaml")
    for typed in (["data", "check", str(records)], ["train", str(yaml)]):
        ended = CliRunner().invoke(main, typed)
        assert ended.exit_code == 1, typed
        assert f"is {kind}, not a file" in ended.output.replace("\n", " "), ended.output
    model = tokenised_model(tmp_path / "model", "llama")
    write_rollouts(tmp_path / "good.jsonl", 5)
    base = file_config(model, tmp_path / "good.jsonl", tmp_path / "run").model_dump(exclude_unset=True)
    sampler = {"prompts": str(records), "reward": "plain_rewards:digit_reward"}
    for sections in (
        {"data": {**base["data"], "path": str(records)}},
        {"evaluation": {"path": str(records)}, "loss": {"type": "cross_entropy"}},
        {
            "data": {"group_size": 2, "tokens_per_microbatch": 600},
            "schedule": {"docs_per_step": 4, "steps": 1},
            "sampler": sampler,
        },
    ):
        with pytest.raises(TruestepError, match=f"is {kind}, not a file"):
            quiet_trainer(Config.model_validate(base | sections))
    if kind != "a socket":
        special(kind, "model/extra.safetensors")
        with pytest.raises(TruestepError, match=f"extra.safetensors is {kind}, not a file"):
            quiet_trainer(Config.model_validate(base))


def test_a_pipe_that_the_process_was_given_is_read() -> None:
    reading, writing_end = os.pipe()
    assert no_file(Path(f"/dev/fd/{reading}")) is None, "as <(command) of a shell gives it"
    os.close(reading)
    os.close(writing_end)
    assert no_file(Path(os.devnull)) is None and no_file(Path("nowhere")) is None


@pytest.mark.parametrize("limit", [500, 20_000])
def test_a_publication_names_what_has_no_room(limit: int, tmp_path: Path) -> None:
    """Of weights that servers are to read: whether transformers writes the file or we do."""
    pytest.importorskip("httpx")
    from truestep.generate.servers.weight_files import WeightsDirectory

    policy = load_policy(tokenised_model(tmp_path / "model", "llama"), device="cpu")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    directory = WeightsDirectory(tmp_path / "weights")
    try:
        with pytest.raises(DiskError, match=rf"^{tmp_path}/weights/.* cannot be written: .*ulimit -f"):
            directory.write(policy, 0, torch.float32)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert directory.write(policy, 0, torch.float32).is_dir(), "once there is room"


def test_a_link_to_itself_is_named(tmp_path: Path) -> None:
    loop, model = tmp_path / "loop.jsonl", tokenised_model(tmp_path / "model", "llama")
    loop.symlink_to(loop.name)
    ended = CliRunner().invoke(main, ["data", "check", str(loop)])
    assert ended.exit_code == 1 and "loop.jsonl" in ended.output and "symbolic links" in ended.output, ended.output
    assert "Traceback" not in ended.output
    write_rollouts(tmp_path / "good.jsonl", 5)
    good = file_config(model, tmp_path / "good.jsonl", tmp_path / "run").model_dump(exclude_unset=True)
    for sections in ({"data": {**good["data"], "path": str(loop)}}, {"checkpoint": {"directory": str(loop)}}):
        with pytest.raises((TruestepError, OSError), match=r"loop\.jsonl"):
            quiet_trainer(Config.model_validate(good | sections))
    assert read_run(loop).problems == [f"The directory {loop} does not exist."]
