"""Isolation of the processes that call rewards, by Linux namespaces. Needs no installation.

`enter` moves a supervisor and its descendants to new namespaces. There they see only their own processes, System V
memory and POSIX queues, and a file system that is read-only except for a directory in memory. When the first process of
the namespace dies, the kernel kills all others. Imports no other module of truestep.

    python -P -m truestep.environments.isolation '{"memory": 1073741824, ...}'    test: prints why isolation fails here
"""

import contextlib
import ctypes
import glob
import json
import os
import select
import signal
import stat
import struct
import sys
from collections.abc import Iterable
from typing import Any, NoReturn

_libc = ctypes.CDLL(None, use_errno=True)

_NEW_MOUNTS, _NEW_IPC, _NEW_USERS, _NEW_PROCESSES, _NEW_NETWORK = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_NO_SETUID, _NO_DEVICES, _NO_PROGRAMS, _BIND, _RECURSIVE, _PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
_SYS_MOUNT_SETATTR, _SYS_LANDLOCK_CREATE, _SYS_LANDLOCK_RESTRICT = 442, 444, 446
_SYS_KEYCTL = {"x86_64": 250, "aarch64": 219}
_ATTR_READ_ONLY, _ATTR_NO_SETUID = 1, 2
_HERE = -100  # AT_FDCWD
_AT_RECURSIVE = 0x8000
_DIES_WITH_PARENT, _DUMPABLE, _DROP_FROM_BOUND, _NO_NEW_PRIVILEGES = 1, 4, 24, 38
_READ_ALL, _KILL, _SET_CAPABILITIES, _TRACE, _FILE_CAPABILITIES = 2, 5, 8, 19, 31  # capabilities
# Capabilities that a worker keeps within its namespace: the first to read what root may read, the second to create
# nested namespaces, as sandboxes do.
_WORKERS = frozenset({_READ_ALL, _FILE_CAPABILITIES})
_LANDLOCK_VERSION_WITH_SCOPES = 6
_SCOPE_ABSTRACT_SOCKETS = 1

NOBODY = 65534
PRIVATE = "/dev/shm"
"""A directory of the private in-memory file system of an isolated reward; `/tmp` is on the same file system."""
_TEMPORARY = ("/tmp", "/var/tmp")
# Directories with sockets through which a process could escape, such as those of docker, systemd and sessions.
_SERVICES = ("/run", "/var/run")
_MOST_FILES = 100_000
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty", "kfd", "dri", "nvidia*")
_ROOM = "/dev/.room"


class IsolationError(Exception):
    """An error that prevents isolation on this host; the message is the reason."""


def room(
    memory: int, writable: Iterable[str] = (), network: bool = True, imported: Iterable[str] = ()
) -> dict[str, Any]:
    """Return the settings of isolated processes, for `enter`.

    `memory` limits the bytes of files in memory, `writable` are writable directories, `imported` are directories to
    import from in addition to sys.path.
    """
    places = [os.path.abspath(path) for path in writable]
    return {"memory": memory, "writable": places, "network": network, "imported": list(imported)}


def enter(room: dict[str, Any]) -> None:
    """Isolate this process, which must have one thread.

    Returns in a child, the first process of the new namespaces. The calling process only waits: it exits when the child
    does, and kills the child when the run exits.
    """
    if sys.platform != "linux":
        raise IsolationError("it needs Linux")
    try:
        run = os.pidfd_open(os.getppid())
        _leave_namespaces(room["network"])
        child = os.fork()
        if child:
            _stand_by(run, child)
        os.close(run)
        _libc.prctl(_DIES_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
        os.setsid()
        _lay_out(room)
        _scope()
        drop_capabilities(_WORKERS | {_KILL, _SET_CAPABILITIES, _TRACE})
        for place in room["writable"]:
            if not os.access(place, os.W_OK):
                nobody = ": as a run of root's, they write as the user nobody" if os.getuid() == 0 else ""
                raise IsolationError(f"{place} is not a directory that rewards can write to{nobody}")
    except OSError as error:
        place = "" if error.filename is None else f"{error.filename}: "
        raise IsolationError(f"{place}{error.strerror}") from error
    except AttributeError as error:  # a function is missing in the system or the C library
        raise IsolationError(str(error)) from error


def limit_worker(isolated: bool) -> None:
    """Drop the capabilities that only the supervisor needs, for this process and its descendants, and undo `hide`."""
    if isolated:
        drop_capabilities(_WORKERS)
    if sys.platform == "linux":
        _libc.prctl(_DUMPABLE, 1, 0, 0, 0)


def hide() -> None:
    """Prevent other processes of this user from reading this process's memory, descriptors and environment."""
    if sys.platform == "linux":
        _libc.prctl(_DUMPABLE, 0, 0, 0, 0)


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


# ---- namespaces


def _leave_namespaces(network: bool) -> None:
    """Move to new namespaces. Processes started after this are in the new PID namespace."""
    waits, goes = os.pipe()
    helper = os.fork()  # stays outside, because only a process outside can map several users into the namespace
    if helper == 0:
        code = 1
        try:
            os.close(goes)
            if os.read(waits, 1):
                _map_users(os.getppid())
                code = 0
        except OSError as error:
            code = error.errno or 1
        finally:
            os._exit(code)
    os.close(waits)
    flags = _NEW_USERS | _NEW_MOUNTS | _NEW_IPC | _NEW_PROCESSES | (0 if network else _NEW_NETWORK)
    try:
        _checked(_libc.unshare(flags), "new namespaces")
        os.write(goes, b"x")
    finally:
        os.close(goes)
        number = os.waitstatus_to_exitcode(os.waitpid(helper, 0)[1])
    if number:
        raise OSError(number, f"the users of a new namespace: {os.strerror(number)}")
    if os.getuid() == NOBODY:  # the host's root, as mapped into the namespace
        os.setgroups([])
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)


def _map_users(process: int) -> None:
    """Map users into a process's user namespace.

    If the run is root, root and nobody are swapped: the process cannot write root's files or the kernel's settings in
    /proc, but can still read what root may read.
    """
    whole = open("/proc/self/uid_map", encoding="ascii").read().split() == ["0", "0", str(2**32 - 1)]  # noqa: SIM115
    folder = f"/proc/{process}"
    if os.getuid() == 0 and whole:
        users = groups = (
            f"0 {NOBODY} 1\n1 1 {NOBODY - 1}\n{NOBODY} 0 1\n{NOBODY + 1} {NOBODY + 1} {2**32 - 2 - NOBODY}\n"
        )
    else:
        users, groups = f"{os.getuid()} {os.getuid()} 1\n", f"{os.getgid()} {os.getgid()} 1\n"
        with open(f"{folder}/setgroups", "w", encoding="ascii") as file:
            file.write("deny")
    for name, mapped in (("uid_map", users), ("gid_map", groups)):
        with open(f"{folder}/{name}", "w", encoding="ascii") as file:
            file.write(mapped)


def _stand_by(run: int, child: int) -> NoReturn:
    """Wait until the run or the child exits, then kill the child, and with it all processes of its namespace."""
    process = os.pidfd_open(child)
    low, high = sorted((run, process))
    os.closerange(0, low)
    os.closerange(low + 1, high)
    os.closerange(high + 1, 1024)
    poll = select.poll()
    for descriptor in (run, process):
        poll.register(descriptor, select.POLLIN)
    poll.poll()
    with contextlib.suppress(OSError):
        os.kill(child, signal.SIGKILL)
    os._exit(max(0, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))


# ---- files


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    done = _libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())
    _checked(done, f"mount {target}")


def _bind(descriptor: int, target: str) -> None:
    _mount(f"/proc/self/fd/{descriptor}", target, "none", _BIND | _RECURSIVE)


def _set_attributes(path: str, add: int, clear: int, what: str) -> None:
    attributes = struct.pack("4Q", add, clear, 0, 0)
    call = _libc.syscall(
        ctypes.c_long(_SYS_MOUNT_SETATTR), _HERE, path.encode(), _AT_RECURSIVE, attributes, ctypes.c_size_t(32)
    )
    _checked(call, what)


def _lay_out(room: dict[str, Any]) -> None:
    """Mount the isolated view: everything read-only, except an in-memory file system and the writable directories."""
    home = os.getcwd()
    kept = _opened(filter(os.path.exists, _needed(home, room["imported"])))
    writable = _opened(room["writable"])
    devices = _opened(path for name in _DEVICES for path in glob.glob(f"/dev/{name}"))
    _mount("none", "/", "none", _PRIVATE | _RECURSIVE)
    _set_attributes("/", _ATTR_READ_ONLY | _ATTR_NO_SETUID, 0, "a read-only file system")
    options = f"size={room['memory']},nr_inodes={_MOST_FILES},mode=755"
    _mount("tmpfs", "/dev", "tmpfs", _NO_SETUID, options)
    if os.getuid() == 0:
        _open_ways(kept)
    places = _hide_places()
    for path, descriptor in kept.items():
        if path.startswith(tuple(f"{place}/" for place in places)):
            _make_target(path, descriptor)
            _bind(descriptor, path)
    for path, descriptor in writable.items():
        _make_target(path, descriptor)
        _bind(descriptor, path)
        _set_attributes(path, 0, _ATTR_READ_ONLY, f"a writable {path}")
    _make_devices(devices)
    _mount("proc", "/proc", "proc", _NO_SETUID | _NO_DEVICES | _NO_PROGRAMS)
    for descriptor in {*kept.values(), *writable.values(), *devices.values()}:
        os.close(descriptor)
    os.chdir(home)


def _opened(paths: Iterable[str]) -> dict[str, int]:
    return {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in sorted(paths)}


def _needed(home: str, imported: list[str]) -> set[str]:
    """Return the paths that a reward is imported and run from. They stay visible inside hidden directories."""
    listed = [*sys.path, *os.environ.get("PATH", "").split(":"), *os.environ.get("LD_LIBRARY_PATH", "").split(":")]
    own = [home, *imported, sys.prefix, sys.base_prefix, os.path.dirname(os.path.realpath(sys.executable))]
    return {os.path.realpath(path) for path in [*listed, *own, "/etc/resolv.conf"] if os.path.isabs(path)}


def _hide_places() -> list[str]:
    """Mount empty directories over temporary directories and directories of service sockets. Returns their paths."""
    temporary = [*_TEMPORARY, *(os.environ.get(name, "") for name in ("TMPDIR", "TMP", "TEMP"))]
    found = {os.path.realpath(place): 0o1777 for place in temporary if os.path.isdir(place)}
    found |= {os.path.realpath(place): 0o755 for place in _SERVICES if os.path.isdir(place)}
    places: list[str] = []
    for number, (place, mode) in enumerate(sorted(found.items())):
        if place.startswith(tuple(f"{outer}/" for outer in places)):
            os.makedirs(place, exist_ok=True)
        else:
            inside = f"{_ROOM}/{number}"
            os.makedirs(inside)
            os.chmod(inside, mode)
            _mount(inside, place, "none", _BIND)
            places.append(place)
        os.chmod(place, mode)
    return places


def _open_ways(paths: Iterable[str]) -> None:
    """Replace inaccessible parent directories of paths by accessible ones with the same entries.

    A nested namespace, such as a sandbox's, lacks root's rights, but may need Python from root's home directory.
    """
    outer = {path[:end] for path in paths for end in range(1, len(path)) if path[end] == "/"}
    for number, place in enumerate(sorted(place for place in outer if not os.stat(place).st_mode & stat.S_IXOTH)):
        names = list(os.scandir(place))
        entries = _opened(entry.path for entry in names if not entry.is_symlink())
        links = {entry.path: os.readlink(entry.path) for entry in names if entry.is_symlink()}
        inside = f"{_ROOM}/way-{number}"
        os.makedirs(inside)
        _mount(inside, place, "none", _BIND)
        for path, descriptor in entries.items():
            _make_target(path, descriptor)
            _bind(descriptor, path)
            os.close(descriptor)
        for path, target in links.items():
            os.symlink(target, path)


def _make_target(path: str, descriptor: int) -> None:
    if os.path.exists(path):
        return
    if os.path.isdir(f"/proc/self/fd/{descriptor}"):
        os.makedirs(path)
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC))


def _make_devices(devices: dict[str, int]) -> None:
    """Fill /dev with the devices that programs need and the GPUs, but no disks, terminals or logs."""
    for path, descriptor in devices.items():
        _make_target(path, descriptor)
        _bind(descriptor, path)
    for name, mode in (("shm", 0o1777), ("pts", 0o755)):
        os.mkdir(f"/dev/{name}")
        os.chmod(f"/dev/{name}", mode)
    _mount("devpts", "/dev/pts", "devpts", _NO_SETUID | _NO_PROGRAMS, "newinstance,ptmxmode=0666,mode=620")
    os.symlink("pts/ptmx", "/dev/ptmx")
    for name, target in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(f"/proc/self/{target}", f"/dev/{name}")


# ---- privileges


def _scope() -> None:
    """Join a new keyring, disable privilege escalation, and block abstract sockets of other processes if possible."""
    if (number := _SYS_KEYCTL.get(os.uname().machine)) is not None:
        _libc.syscall(ctypes.c_long(number), 1, None)  # join a new session keyring
    _checked(_libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "no new privileges")
    if has_scopes():
        attributes = struct.pack("3Q", 0, 0, _SCOPE_ABSTRACT_SOCKETS)
        rules = _libc.syscall(ctypes.c_long(_SYS_LANDLOCK_CREATE), attributes, ctypes.c_size_t(24), 0)
        _checked(rules, "scopes")
        _checked(_libc.syscall(ctypes.c_long(_SYS_LANDLOCK_RESTRICT), rules, 0), "scopes")
        os.close(rules)


def has_scopes() -> bool:
    """Return whether the kernel can block abstract sockets (Landlock since Linux 6.12)."""
    version: int = _libc.syscall(ctypes.c_long(_SYS_LANDLOCK_CREATE), None, ctypes.c_size_t(0), 1)
    return version >= _LANDLOCK_VERSION_WITH_SCOPES


def drop_capabilities(spare: frozenset[int]) -> None:
    """Drop all capabilities except `spare`, for this process and the programs it starts."""
    for number in range(64):
        if number not in spare:
            _libc.prctl(_DROP_FROM_BOUND, number, 0, 0, 0)
    kept = sum(1 << number for number in spare)
    header, low = struct.pack("Ii", 0x20080522, 0), struct.pack("3I", kept, kept, 0)
    _checked(_libc.capset(header, low + struct.pack("3I", 0, 0, 0)), "capabilities")


if __name__ == "__main__":
    try:
        enter(json.loads(sys.argv[1]))
    except IsolationError as problem:
        print(problem)
        sys.exit(1)
