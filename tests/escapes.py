"""A reward that tries to leave its process. The field `attack` names how; SECURITY.md has a row for each.

An attack says True where it reached what is not its own. It opens files without writing to them where that shows it,
sends signals that change nothing, and what it must write, fill or start is the test's own: a file below the test's
directory, a name with the test's mark in it, a process that ends by itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import resource
import signal
import socket
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path

import truestep

ATTACKS: dict[str, Callable[[Victim], object]] = {}
LONG = 20.0  # seconds, after which what an attack started ends by itself
SEEN = 6.0  # seconds in which a supervisor has looked at what its worker takes, also on a busy machine
libc = ctypes.CDLL(None, use_errno=True)
CLONE_FILES, CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER = 0x400, 0x20000, 0x8000000, 0x10000000


class Victim:
    """What the test has put up for attack."""

    def __init__(self, place: Path):
        self.place = place  # which the reward may write
        self.run = place.parent / "run"
        self.home = place.parent
        self.mark = place.parent.name  # in the names of what is outside of every directory
        while not (place / "trainer").exists() or not (place / "trainer").read_text():
            time.sleep(0.01)
        number, self.terminal, self.port = (place / "trainer").read_text().split()
        self.trainer = int(number)
        self.proc = Path("/proc") / number


def attack(function: Callable[[Victim], object]) -> Callable[[Victim], object]:
    ATTACKS[function.__name__] = function
    return function


def reward(prompt: object, completion: str, *, attack: str = "", place: str = "", **_: object) -> float:
    if attack:
        results = Path(place) / "results"
        results.mkdir(exist_ok=True)
        (results / attack).touch()
        try:
            reached = ATTACKS[attack](Victim(Path(place)))
        except (OSError, ValueError) as error:
            (results / attack).write_text(f"held: {error}")
        else:
            (results / attack).write_text("reached" if reached else "held")
    return len(set(completion.split())) / 10


def opens(path: Path, flags: int = os.O_WRONLY) -> bool:
    os.close(os.open(path, flags | os.O_CLOEXEC | os.O_NOCTTY))
    return True


def makes_in(folder: Path | str) -> bool:
    """A file could be made there; this one has no name."""
    os.close(os.open(folder, os.O_TMPFILE | os.O_WRONLY, 0o600))
    return True


def checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


# ---- files


@attack
def writes_the_run_directory(victim: Victim) -> bool:
    return makes_in(victim.run)


@attack
def writes_the_configuration(victim: Victim) -> bool:
    return opens(victim.home / "config.yaml")


@attack
def writes_the_model(victim: Victim) -> bool:
    return opens(victim.home / "model" / "config.json")


@attack
def writes_the_working_directory(victim: Victim) -> bool:
    return makes_in(os.getcwd())


@attack
def writes_the_home_directory(victim: Victim) -> bool:
    return makes_in(Path.home())


@attack
def writes_the_trainers_own_code(victim: Victim) -> bool:
    return opens(Path(truestep.__file__))


@attack
def writes_compiled_code(victim: Victim) -> bool:
    return makes_in(Path(truestep.__file__).parent / "__pycache__")


@attack
def writes_installed_packages(victim: Victim) -> bool:
    return makes_in(Path(next(path for path in sys.path if path.endswith("site-packages"))))


@attack
def writes_system_files(victim: Victim) -> bool:
    return makes_in("/etc")


@attack
def undoes_read_only(victim: Victim) -> bool:
    """In namespaces of its own, where it has every capability."""
    if (child := os.fork()) == 0:
        libc.unshare(0x10000000 | 0x20000)
        for path in ("/", str(victim.home), os.getcwd()):
            libc.mount(b"none", path.encode(), None, ctypes.c_ulong(32 | 4096), None)
        with contextlib.suppress(OSError):
            os._exit(7 * opens(victim.home / "config.yaml"))
        os._exit(0)
    return os.waitpid(child, 0)[1] != 0


@attack
def mounts(victim: Victim) -> bool:
    target = str(victim.place / "mounted").encode()
    os.makedirs(target, exist_ok=True)
    checked(libc.mount(b"tmpfs", target, b"tmpfs", ctypes.c_ulong(0), b"size=4096"))
    checked(libc.umount(target))
    return True


@attack
def opens_a_disk(victim: Victim) -> bool:
    return any(opens(path, os.O_RDONLY) for path in Path("/dev").iterdir() if path.is_block_device())


@attack
def reads_the_users_files(victim: Victim) -> bool:
    return opens(victim.home / "config.yaml", os.O_RDONLY)


# ---- what the trainer, or the next one, imports


def _module(path: Path, name: str, victim: Victim) -> bool:
    """Write a module that says when it is imported; the test looks whether it was."""
    path.mkdir(parents=True, exist_ok=True)
    (path / name).write_text(f"open({str(victim.place / 'imported')!r}, 'a').write({name!r} + '\\n')\n")
    return True


@attack
def shadows_installed_modules(victim: Victim) -> bool:
    for name in ("pandas", "pyarrow", "torch", "json", "decimal", "safetensors", "transformers", "truestep"):
        _module(Path.cwd(), f"{name}.py", victim)
    return False  # the test looks whether one was imported


@attack
def shadows_missing_modules(victim: Victim) -> bool:
    for name in ("sitecustomize", "usercustomize", "bottleneck", "numexpr", "flash_attn", "late_optional"):
        _module(Path.cwd(), f"{name}.py", victim)
    return False


@attack
def plants_in_the_users_site(victim: Victim) -> bool:
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return _module(Path.home() / ".local" / "lib" / name / "site-packages", "usercustomize.py", victim)


@attack
def plants_in_the_compilers_caches(victim: Victim) -> bool:
    """Inductor's, in the temporary directory, is looked for by the test: an isolated reward has another one."""
    _module(Path(tempfile.gettempdir()) / "torchinductor", "planted.py", victim)
    return _module(Path.home() / ".triton" / "cache", "planted.py", victim)


@attack
def plants_in_the_cache_of_models(victim: Victim) -> bool:
    return _module(Path.home() / ".cache" / "huggingface" / "modules", "planted.py", victim)


# ---- /proc, tracing, signals


@attack
def reads_the_environment(victim: Victim) -> bool:
    return b"hunter2" in (victim.proc / "environ").read_bytes()


@attack
def reads_the_memory(victim: Victim) -> bool:
    return opens(victim.proc / "mem", os.O_RDONLY)


@attack
def writes_the_memory(victim: Victim) -> bool:
    return opens(victim.proc / "mem", os.O_RDWR)


@attack
def lists_the_descriptors(victim: Victim) -> bool:
    return bool(os.listdir(victim.proc / "fd"))


@attack
def takes_a_descriptor(victim: Victim) -> bool:
    process = checked(libc.syscall(434, victim.trainer, 0))
    return checked(libc.syscall(438, process, 2, 0)) >= 0


@attack
def follows_the_root(victim: Victim) -> bool:
    return opens(victim.proc / "root" / str(victim.home).lstrip("/") / "config.yaml", os.O_RDONLY)


@attack
def follows_the_working_directory(victim: Victim) -> bool:
    return opens(victim.proc / "cwd" / "config.yaml", os.O_RDONLY)


@attack
def traces_the_trainer(victim: Victim) -> bool:
    """A child does it and ends, with which it lets go."""
    if (child := os.fork()) == 0:
        os._exit(7 if libc.ptrace(0x4206, victim.trainer, None, None) == 0 else 0)
    return os.waitpid(child, 0)[1] != 0


@attack
def sees_the_trainer(victim: Victim) -> bool:
    return b"config.yaml" in (victim.proc / "cmdline").read_bytes()


@attack
def signals_the_trainer(victim: Victim) -> bool:
    os.kill(victim.trainer, 0)
    return True


@attack
def signals_the_trainers_group(victim: Victim) -> bool:
    os.killpg(victim.trainer, 0)  # which the test made it the leader of
    return True


@attack
def kills_its_supervisor_and_stays(victim: Victim) -> None:
    _stay(victim, "stays")
    if os.getppid() > 1:  # the first process of a namespace takes no signal from inside
        os.kill(os.getppid(), signal.SIGKILL)


@attack
def leaves_a_process(victim: Victim) -> bool:
    _stay(victim, "left")
    return False  # the test looks for it


def _stay(victim: Victim, name: str) -> None:
    """Start a process in a session of its own, whose parent ends."""
    if (child := os.fork()) == 0:
        os.setsid()
        if os.fork() == 0:
            command = [sys.executable, "-S", "-c", "import time; time.sleep(120)", f"{victim.mark}-{name}"]
            os.execv(sys.executable, command)
        os._exit(0)
    os.waitpid(child, 0)


@attack
def starts_too_many_processes(victim: Victim) -> bool:
    for _ in range(270):
        if os.fork() == 0:
            time.sleep(LONG)
            os._exit(0)
    time.sleep(LONG)
    return True


# ---- memory that others share


@attack
def leaves_system_v_memory(victim: Victim) -> bool:
    checked(libc.shmget(system_v_key(victim.mark), 2**20, 0o1666))
    return False


def system_v_key(mark: str) -> int:
    return sum(map(ord, mark)) + 0x7E570000


@attack
def leaves_a_file_in_memory(victim: Victim) -> bool:
    Path(f"/dev/shm/{victim.mark}-left").write_bytes(b"x")
    return False


@attack
def reads_others_memory_files(victim: Victim) -> bool:
    return opens(Path(f"/dev/shm/{victim.mark}-canary"), os.O_RDONLY)


@attack
def leaves_a_message_queue(victim: Victim) -> bool:
    checked(libc.mq_open(f"/{victim.mark}".encode(), os.O_CREAT | os.O_RDWR, 0o666, None))
    return False


LARGE = 320 * 2**20  # more than the run's reward_memory


@attack
def takes_memory_in_a_descriptor(victim: Victim) -> bool:
    with open(os.memfd_create("large"), "wb") as file:
        _fill(file.fileno())
    return True


@attack
def hides_the_memory_that_it_takes(victim: Victim) -> bool:
    libc.prctl(4, 0, 0, 0, 0)  # nobody of this user may look
    return takes_memory_in_a_descriptor(victim)


@attack
def takes_memory_in_files(victim: Victim) -> bool:
    path = Path(f"/dev/shm/{victim.mark}-large-{os.getpid()}")
    try:
        with path.open("wb") as file:
            _fill(file.fileno())
    finally:
        path.unlink()
    return True


@attack
def takes_memory_in_system_v(victim: Victim) -> bool:
    libc.shmat.restype = ctypes.c_void_p
    segment = checked(libc.shmget(0, LARGE, 0o1600))
    address = libc.shmat(segment, None, 0)
    checked(libc.shmctl(segment, 0, None))  # it goes with the last process that has it
    ctypes.memset(address, 1, LARGE)
    time.sleep(SEEN)
    libc.shmdt(ctypes.c_void_p(address))
    return True


@attack
def takes_memory_in_a_descriptor_of_a_thread(victim: Victim) -> bool:
    """A thread may have a table of descriptors for itself."""

    def take() -> None:
        checked(libc.unshare(CLONE_FILES))
        took.append(takes_memory_in_a_descriptor(victim))

    took: list[bool] = []
    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return bool(took)


@attack
def takes_memory_in_a_message(victim: Victim) -> bool:
    """A descriptor in a message that nobody has read is in no table."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for _ in range(LARGE // 2**26):  # each is closed before it is too much
            descriptor = os.memfd_create("large")
            for _ in range(4):
                os.write(descriptor, b"x" * 2**24)
            socket.send_fds(ours, [b"x"], [descriptor])
            os.close(descriptor)
        time.sleep(SEEN)
    return True


@attack
def takes_memory_in_sockets(victim: Victim) -> bool:
    """What was sent and not read lies in the kernel."""
    parents = []
    for _ in range(LARGE // 2**26):
        ours, theirs = os.pipe()
        if os.fork() == 0:
            pairs, sent = [], 0
            while sent < 2**26:
                pairs.append(socket.socketpair())
                for one in pairs[-1]:
                    one.setblocking(False)
                    with contextlib.suppress(BlockingIOError):
                        while True:
                            sent += one.send(b"x" * 2**15)
            os.write(theirs, b"x")
            time.sleep(SEEN)
            os._exit(0)
        parents.append(ours)
    filled = all(os.read(one, 1) for one in parents)
    time.sleep(SEEN)
    return filled


def _in_own_namespaces(flags: int, take: Callable[[], None]) -> bool:
    """In a child, since one that has several threads cannot enter a namespace of users."""
    child = os.fork()
    if child == 0:
        done = 1
        maps = {"uid_map": os.getuid(), "setgroups": 0, "gid_map": os.getgid()}
        with contextlib.suppress(OSError):
            checked(libc.unshare(CLONE_NEWUSER | flags))
            for name, own in maps.items():
                Path(f"/proc/self/{name}").write_text("deny" if name == "setgroups" else f"{own} {own} 1\n")
            take()
            done = 0
        os._exit(done)
    return os.waitpid(child, 0)[1] == 0


@attack
def takes_memory_in_its_own_file_system(victim: Victim) -> bool:
    def take() -> None:
        checked(libc.mount(b"tmpfs", tempfile.gettempdir().encode(), b"tmpfs", ctypes.c_ulong(0), b"size=8g"))
        with open(f"{tempfile.gettempdir()}/large", "wb") as file:
            _fill(file.fileno())

    return _in_own_namespaces(CLONE_NEWNS, take)


@attack
def takes_memory_in_its_own_system_v(victim: Victim) -> bool:
    def take() -> None:
        libc.shmat.restype = ctypes.c_void_p
        segment = checked(libc.shmget(0, LARGE, 0o1600))
        address = ctypes.c_void_p(libc.shmat(segment, None, 0))
        ctypes.memset(address, 1, LARGE)
        libc.shmdt(address)  # no process has it
        time.sleep(SEEN)

    return _in_own_namespaces(CLONE_NEWIPC, take)


def _fill(descriptor: int) -> None:
    for _ in range(LARGE // 2**24):
        os.write(descriptor, b"x" * 2**24)
    time.sleep(SEEN)


# ---- what others wait for


@attack
def locks_a_file(victim: Victim) -> bool:
    """A lock needs no right to write."""
    with (victim.run / "config.yaml").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return True


@attack
def takes_a_lease(victim: Victim) -> bool:
    """Whoever opens the file for writing then waits."""
    with (victim.run / "config.yaml").open() as file:
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return True


@attack
def goes_before_all_others(victim: Victim) -> bool:
    before = os.sched_getscheduler(0), os.sched_getparam(0)
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    os.sched_setscheduler(0, *before)
    return True


# ---- sockets and keys


@attack
def listens_to_the_network(victim: Victim) -> bool:
    """Every packet of the machine, with keys that are in them."""
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) as one:
        one.bind(("lo", 0))
    return True


def _connects(address: object, family: int) -> bool:
    with socket.socket(family) as connection:
        connection.connect(address)  # type: ignore[arg-type]
    return True


@attack
def connects_to_an_abstract_socket(victim: Victim) -> bool:
    return _connects(f"\0{victim.mark}", socket.AF_UNIX)


@attack
def connects_to_a_socket_in_tmp(victim: Victim) -> bool:
    return _connects(str(victim.home / "tmp" / "socket"), socket.AF_UNIX)


@attack
def connects_to_a_socket_in_run(victim: Victim) -> bool:
    return _connects(f"/run/{victim.mark}", socket.AF_UNIX)


@attack
def connects_to_a_port(victim: Victim) -> bool:
    return _connects(("127.0.0.1", int(victim.port)), socket.AF_INET)


@attack
def finds_a_key(victim: Victim) -> bool:
    number = {"x86_64": 250, "aarch64": 219}[os.uname().machine]
    return checked(libc.syscall(number, 10, -3, b"user", victim.mark.encode(), 0)) > 0


# ---- the console


@attack
def writes_the_console_by_its_descriptor(victim: Victim) -> bool:
    return _writes(victim.proc / "fd" / "2")


@attack
def writes_the_terminal(victim: Victim) -> bool:
    return _writes(Path(victim.terminal))


@attack
def writes_its_terminal(victim: Victim) -> bool:
    return _writes(Path("/dev/tty"))


def canary(name: str) -> str:
    return f"\x1b]0;{name}\x07"


def _writes(path: Path) -> bool:
    descriptor = os.open(path, os.O_WRONLY | os.O_NOCTTY)
    os.write(descriptor, canary("written").encode())
    os.close(descriptor)
    return True


@attack
def types_into_the_terminal(victim: Victim) -> bool:
    descriptor = os.open(victim.terminal, os.O_RDWR | os.O_NOCTTY)
    try:
        fcntl.ioctl(descriptor, termios.TIOCSTI, b"x")
    finally:
        os.close(descriptor)
    return True


@attack
def prints_escapes(victim: Victim) -> bool:
    print(canary("printed"))
    print(canary("printed"), file=sys.stderr)
    return False  # the test looks for them on the console


# ---- the disk, limits and the kernel


@attack
def fills_the_disk(victim: Victim) -> bool:
    for folder in (Path.cwd(), victim.run, Path.home()):
        with contextlib.suppress(OSError):
            makes_in(folder)
            return True
    return False


@attack
def fills_the_temporary_directory(victim: Victim) -> bool:
    path = Path(tempfile.gettempdir()) / "large"
    with path.open("wb") as file, contextlib.suppress(OSError):
        for _ in range(6):
            file.write(b"x" * 2**24)
    return False  # the test looks whether it is in its own


@attack
def raises_its_limits(victim: Victim) -> bool:
    resource.setrlimit(resource.RLIMIT_CORE, (2**20, 2**20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    return True


@attack
def asks_for_a_core_dump_elsewhere(victim: Victim) -> bool:
    return opens(Path("/proc/sys/kernel/core_pattern"))


@attack
def reaches_the_kernels_switches(victim: Victim) -> bool:
    return opens(Path("/proc/sysrq-trigger"))


@attack
def writes_the_kernels_log(victim: Victim) -> bool:
    return opens(Path("/dev/kmsg"))


@attack
def renames_the_machine(victim: Victim) -> bool:
    name = os.uname().nodename.encode()
    checked(libc.sethostname(name, len(name)))  # as it was
    return True


@attack
def leaves_its_control_group(victim: Victim) -> bool:
    files = [*Path("/sys/fs/cgroup").glob("cgroup.procs"), *Path("/sys/fs/cgroup").glob("*/cgroup.procs")]
    return any(opens(path) for path in files)


@attack
def schedules_a_job(victim: Victim) -> bool:
    return makes_in("/var/spool")
