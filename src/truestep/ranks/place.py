"""Finds where in the code the main thread is, and whether it waits for other ranks there."""

import os
import sys
import sysconfig
import threading
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch.distributed as dist

import truestep
from truestep.config.custom import own_directories
from truestep.process import progress

_TRUESTEP = str(Path(truestep.__file__).parent) + os.sep
_RANKS = os.path.join(_TRUESTEP, "ranks") + os.sep  # communication helpers: their callers say more
_PROGRESS = progress.__file__
_DISTRIBUTED = os.path.dirname(dist.__file__) + os.sep
_AUTOGRAD = os.path.join(os.path.dirname(os.path.dirname(dist.__file__)), "autograd") + os.sep
_PATHS = sysconfig.get_paths()
_INSTALLED = tuple({_PATHS[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_THREADING = (threading.__file__, os.path.join(_PATHS["stdlib"], "concurrent") + os.sep)
_DEBUGGERS = ("pdb", "bdb")


@dataclass(frozen=True)
class CodeLocation:
    """A line of truestep's or the user's code."""

    text: str = ""  # file, line and function; empty: the main thread is in other code
    waits: bool = False  # for other ranks
    debugged: bool = False  # a debugger is open, so the run is not stalled


def find_place() -> CodeLocation:
    """Return the innermost line of truestep's or the user's code that the main thread is in."""
    # Without this call's own frame, which would refer to itself: the garbage collector alone could then free what the
    # functions of all frames hold, such as activations.
    frames = sys._current_frames() | {threading.get_ident(): sys._getframe(1)}
    main = threading.main_thread().ident or 0
    place = _place(frames.get(main))
    waits, text = place.waits or progress.OTHER_RANKS in progress.waits(main), place.text
    if not waits and _waits_for_a_thread(frames.get(main)):
        others = {thread: _place(frame) for thread, frame in frames.items() if thread != main}
        waits = any(other.waits for other in others.values())
        # If the other thread has named what it waits for, such as a write, its line says more.
        text = next((other.text for thread, other in others.items() if progress.waits(thread) and other.text), text)
    return CodeLocation(text, waits, place.debugged)


def _place(frame: FrameType | None) -> CodeLocation:
    waits = debugged = False
    between = ""  # the line in the communication helpers, used if no caller is found
    while frame is not None:
        code = frame.f_code
        file = code.co_filename
        waits |= file.startswith(_DISTRIBUTED)
        debugged |= frame.f_globals.get("__name__") in _DEBUGGERS
        if _is_own(file) and file != _PROGRESS:
            text = f"{os.path.basename(file)}:{frame.f_lineno} in {code.co_name}"
            if not file.startswith(_RANKS):
                return CodeLocation(text, waits, debugged)
            between = between or text
        frame = frame.f_back
    return CodeLocation(between, waits, debugged)


def _is_own(file: str) -> bool:
    """Tell whether a file belongs to truestep or the user, and not to an installed library."""
    if file.startswith((_TRUESTEP, *own_directories())):
        return True
    return not file.startswith(("<", *_INSTALLED)) and "site-packages" not in file and "dist-packages" not in file


def _waits_for_a_thread(frame: FrameType | None) -> bool:
    """Tell whether a thread waits for another one, such as the planner's or autograd's thread."""
    return frame is not None and frame.f_code.co_filename.startswith((*_THREADING, _AUTOGRAD))
