"""Rewards that try to leave their process, in whole runs, against the table of SECURITY.md."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

import escapes
from doors.own_server import Process, serve
from processes import mentioning
from selection import in_tiers
from small_runs import merged, sampled_config, sort_prompts, word_model, write_lines
from truestep.environments.isolation import has_scopes
from truestep.environments.memory import _in_descriptors
from truestep.environments.process import isolation_refused

SECURITY = Path(__file__).parents[2] / "SECURITY.md"
PATIENCE = 300.0
KINDS = ("in_process", "evaluation", "server")
ROW = re.compile(r"^\| `(\w+)` \|[^|]*\| ([^|]*) \| ([^|]*) \|$", re.MULTILINE)
PROMISES = {name: {"auto": isolated, "off": bare} for name, isolated, bare in ROW.findall(SECURITY.read_text())}
# What is not promised may hold all the same: where the system has guards of its own, and where it takes root.
OFTEN_HELD = {
    *("traces_the_trainer", "takes_a_descriptor", "reads_the_memory", "writes_the_memory", "types_into_the_terminal"),
    *("opens_a_disk", "mounts", "writes_system_files", "raises_its_limits", "leaves_its_control_group"),
    *("goes_before_all_others", "listens_to_the_network", "writes_the_kernels_log", "renames_the_machine"),
    *("takes_a_lease", "takes_memory_in_its_own_file_system", "takes_memory_in_its_own_system_v"),
    *("asks_for_a_core_dump_elsewhere", "reaches_the_kernels_switches", "schedules_a_job", "finds_a_key"),
    *(
        "leaves_a_message_queue",
        "hides_the_memory_that_it_takes",
        "connects_to_a_socket_in_run",
        "writes_installed_packages",
        "writes_compiled_code",
    ),
}


def promised(name: str, isolation: str) -> bool:
    words = PROMISES[name][isolation]
    assert words in ("held", "not promised", "held, from Linux 6.12 on"), (name, words)
    return words == "held" or (words != "not promised" and has_scopes())


@dataclass
class Outcome:
    code: int
    console: bytes
    reached: dict[str, bool]
    reports: dict[str, str]


@contextlib.contextmanager
def victims(folder: Path) -> Iterator[int]:
    """What attacks look for outside of every process: sockets, a file in memory, a key. Gives the number of a port."""
    mark = folder.name
    with contextlib.ExitStack() as stack:
        for address in (f"\0{mark}", str(folder / "tmp" / "socket"), f"/run/{mark}"):
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            with contextlib.suppress(OSError):  # no right to write to /run
                listener.bind(address)
                listener.listen(64)
        port = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
        memory = Path(f"/dev/shm/{mark}-canary")
        memory.touch()
        stack.callback(memory.unlink)
        stack.callback(lambda: Path(f"/run/{mark}").unlink(missing_ok=True))
        number = {"x86_64": 248, "aarch64": 217}.get(os.uname().machine)
        if number is not None:
            escapes.libc.syscall(number, b"user", mark.encode(), b"x", ctypes.c_size_t(1), -3)
        yield port


def outcome(folder: Path, kind: str, isolation: str, attacks: list[str]) -> Outcome:
    """Train in a process of its own, which is started as users start it, and see what the attacks reached."""
    for name in ("place", "tmp"):
        (folder / name).mkdir(parents=True)
        (folder / name).chmod(0o777)
    model = word_model(folder / "model")
    fields = [{"attack": attack, "place": str(folder / "place")} for attack in attacks]
    hostile = [{**prompt, **field} for prompt, field in zip(sort_prompts(len(fields)), fields, strict=True)]
    write_lines(folder / "hostile.jsonl", hostile)
    write_lines(folder / "good.jsonl", sort_prompts(2))
    prompts, size = ("hostile.jsonl", 2 * len(attacks)) if kind != "evaluation" else ("good.jsonl", 4)
    sections = {
        "data": {"group_size": 2, "tokens_per_microbatch": 512},
        "schedule": {"docs_per_step": size, "steps": 1},
        "sampler": {
            "reward": "escapes:reward",
            "reward_isolation": isolation,
            "reward_writable": [str(folder / "place")],
            "reward_memory": 0.25,
            "reward_timeout": 15.0,
            "reward_workers": 4,
        },
        "logging": {"console": True},
    }
    if kind == "evaluation":
        sections["evaluation"] = {"prompts": "hostile.jsonl", "every": 1}
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(victims(folder))
        if kind == "server":
            url = stack.enter_context(serve(Process(model, "mine", longest=200)))
            server = {"type": "server", "protocol": "doors.own_server:OwnServer", "model": "mine", "urls": [url]}
            sections = merged(sections, {"sampler": server})
        config = sampled_config(Path("model"), Path(prompts), Path("run"), **sections)
        (folder / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True)))
        code, console = run(folder, port)
        reports = {file.name: file.read_text() for file in (folder / "place" / "results").glob("*")}
        reached = {name: reports.get(name) == "reached" for name in attacks}
        reached |= {name: left for name, left in left_over(folder, console).items() if name in attacks}
        return Outcome(code, console, reached, reports)


def run(folder: Path, port: int) -> tuple[int, bytes]:
    """Run `python -m truestep train` on a terminal of its own; give its exit code and what the terminal showed."""
    ours, theirs = os.openpty()
    environment = os.environ | {"HOME": str(folder), "TMPDIR": str(folder / "tmp"), "TRUESTEP_SECRET": "hunter2"}
    command = [sys.executable, "-m", "truestep", "train", "config.yaml", "--seed", "0"]
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    (folder / "place" / "trainer").write_text(f"{process.pid} {os.ttyname(theirs)} {port}")
    os.close(theirs)
    shown = bytearray()

    def read() -> None:
        with contextlib.suppress(OSError):  # the last one that had the terminal open is gone
            while portion := os.read(ours, 2**16):
                shown.extend(portion)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        code = process.wait(PATIENCE)
    finally:
        process.kill()
        process.wait()
        left = mentioning(f"{folder.name}-stays")
        (folder / "stayed").write_text(" ".join(map(str, left)))
        for number in left:
            os.kill(number, 9)
        reader.join(30)
        os.close(ours)
    return code, bytes(shown)


def left_over(folder: Path, console: bytes) -> dict[str, bool]:
    """See what attacks left or reached that no report of theirs is believed about; take it away."""
    mark, place = folder.name, folder / "place"
    imported = (place / "imported").read_text().split() if (place / "imported").exists() else []
    segments = [line.split() for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]]
    own = [int(fields[1]) for fields in segments if int(fields[0]) == escapes.system_v_key(mark)]
    for number in own:
        escapes.libc.shmctl(number, 0, None)
    in_memory = Path(f"/dev/shm/{mark}-left")
    found = {
        "shadows_installed_modules": bool({"pandas.py", "torch.py", "json.py", "truestep.py"} & set(imported)),
        "shadows_missing_modules": bool({"sitecustomize.py", "bottleneck.py", "numexpr.py"} & set(imported)),
        "kills_its_supervisor_and_stays": (folder / "stayed").read_text() != "",
        "leaves_a_process": bool(mentioning(f"{mark}-left")),
        "leaves_system_v_memory": bool(own),
        "leaves_a_file_in_memory": in_memory.exists(),
        "leaves_a_message_queue": escapes.libc.mq_unlink(f"/{mark}".encode()) == 0,
        "prints_escapes": escapes.canary("printed").encode() in console,
        "fills_the_temporary_directory": (folder / "tmp" / "large").exists(),
    }
    in_memory.unlink(missing_ok=True)
    if (folder / "tmp" / "torchinductor").exists():
        found["plants_in_the_compilers_caches"] = True
    return found


def test_a_table_of_descriptors_that_a_thread_has_alone_counts() -> None:
    """Where the process's own table has nothing of it."""
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        escapes.checked(escapes.libc.unshare(escapes.CLONE_FILES))
        descriptor = os.memfd_create("large")
        os.write(descriptor, b"x" * 2**24)
        held.set()
        done.wait()
        os.close(descriptor)

    before = _in_descriptors([os.getpid()], True)
    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        assert _in_descriptors([os.getpid()], True) - before == 2**24
    finally:
        done.set()
        thread.join()
    assert _in_descriptors([os.getpid()], True) == before


def test_every_attack_has_a_row_and_every_row_an_attack() -> None:
    assert list(PROMISES) == list(escapes.ATTACKS)
    assert len(PROMISES) >= 30


# The slow ones wait until a limit is seen to be broken, or is not.
SLOW = [name for name in escapes.ATTACKS if ("memory" in name and "takes" in name) or name.startswith("starts_")]
ATTACKS = {"slow": SLOW, "quick": [name for name in escapes.ATTACKS if name not in SLOW]}
# An evaluation asks for each completion once, whatever becomes of it.
CASES = [
    *((kind, isolation, "quick") for kind in KINDS for isolation in ("auto", "off")),
    *(("evaluation", isolation, "slow") for isolation in ("auto", "off")),
]
EVERY_NIGHT = [
    ("in_process", "auto", "quick"),
    ("in_process", "off", "quick"),
    ("server", "auto", "quick"),
    *CASES[-2:],
]


@pytest.mark.parametrize(("kind", "isolation", "speed"), in_tiers(CASES, [], EVERY_NIGHT, "nightly"))
def test_the_table_of_the_page_is_what_happens(
    kind: str, isolation: str, speed: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    attacks = ATTACKS[speed]
    if isolation == "auto" and (why := isolation_refused()) is not None:
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("e") / f"ts{os.getpid()}{kind[:2]}{isolation}"
    found = outcome(folder, kind, isolation, attacks)
    shown = found.console.decode(errors="replace")
    assert found.code == 0 and "all 1 steps are done" in shown, shown[-3000:]
    assert set(found.reports) == set(attacks), "each was made"
    promises = {name for name in attacks if promised(name, isolation)}
    got = {name for name, reached in found.reached.items() if reached}
    assert not {name: found.reports[name] for name in got & promises}
    no_attacks = set(attacks) - promises - got - OFTEN_HELD - {"connects_to_an_abstract_socket"}
    assert not {name: found.reports[name] for name in no_attacks}, "the page promises too little, or it is no attack"
    assert ("rewards: isolated" in shown) == (isolation == "auto")
    if speed == "slow":
        return
    assert (escapes.canary("written").encode() in found.console) == (isolation == "off")
    printed = (folder / "run" / "rewards.log").read_text().splitlines()
    assert any(line.endswith(r": \x1b]0;printed\x07") for line in printed) and all(map(str.isprintable, printed))
