"""Set-up of forked processes that run a user's code. Imports no other module of truestep."""

import contextlib
import ctypes
import os
import random
import signal
import sys
import zlib

_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_ADOPTS_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent dies."""
    _set(_DIES_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Make this process the parent of its descendants whose own parents exit."""
    _set(_ADOPTS_ORPHANS, 1)


def _set(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # Linux only
        ctypes.CDLL(None).prctl(option, value)


def seed_all(seed: str) -> None:
    """Seed the random generators, so that a user's random numbers depend on this seed alone."""
    random.seed(seed)
    number = zlib.crc32(seed.encode())
    with contextlib.suppress(Exception):  # a user's code may have changed these modules
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(number)
        if "torch" in sys.modules:
            sys.modules["torch"].manual_seed(number)
