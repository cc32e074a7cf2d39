"""A server's side of weights in memory: it maps them, checks every tensor beside its work, and then loads them."""

import os
import secrets
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import torch

from truestep.transfer.checksum import checksum
from truestep.transfer.memory import TOKEN
from truestep.transfer.source import Files, Opened, TransferError

UNDER_WAY, CHECKED, FAILED = ".checking", ".checked", ".failed"  # how the names of marks end
NOT_TAKEN = "the model did not take"  # in an error that would come again
Load = Callable[[Iterator[tuple[str, torch.Tensor]]], Collection[str] | None]


class Receiver:
    """Takes weights from one trainer's memory."""

    def __init__(self) -> None:
        self._files = Files()
        self._staged: _Staged | None = None

    def connect(self, directory: str, token: str) -> None:
        """Show that the trainer's memory is seen here."""
        self.release()
        self._files.clear()
        try:
            found = (Path(directory) / TOKEN).read_text(encoding="utf-8")
        except OSError as error:
            raise TransferError(f"{directory} cannot be read here: {error.strerror}") from error
        if found != token:
            raise TransferError(f"{directory} is here the memory of another machine or run")

    def stage(self, index: str, marks: str) -> None:
        """Begin to check weights, and return. A mark in the directory `marks` says how far it is."""
        self.release()
        self._staged = _Staged(Path(index), Path(marks), self._files)
        self._staged.begin()

    def load(self, index: str, load: Load) -> set[str]:
        """Give the staged weights to `load`; return the names of their tensors."""
        staged = self._staged
        if staged is None or str(staged.index) != index:
            raise TransferError(f"{index} was not staged: this is another process than the one that was asked to")
        try:
            return staged.give(load)
        finally:
            self.release()

    def release(self) -> None:
        """Let go of what is staged."""
        if self._staged is not None:
            self._staged.close()
            self._staged = None


class _Staged:
    """Weights that are being checked, or are checked and wait to be loaded."""

    def __init__(self, index: Path, marks: Path, files: Files):
        self.index = index
        self._mark = marks / f"{os.getpid()}-{secrets.token_hex(4)}"
        self._error: BaseException | None = None
        self._ended = False
        self._opened = Opened(index, files)
        self._thread = threading.Thread(target=self._check, name="check weights", daemon=True)

    def begin(self) -> None:
        self._mark.with_suffix(UNDER_WAY).touch()
        self._thread.start()

    def _check(self) -> None:
        try:
            for name, tensor in self._opened.tensors.items():
                if self._ended:
                    return
                if (found := checksum(tensor)) != (sent := self._opened.checksums[name]):
                    raise TransferError(f"{name} arrived with checksum {found}, and {sent} was sent")
        except BaseException as error:
            self._error = error
        text = "" if self._error is None else str(self._error) or repr(self._error)
        try:
            under_way = self._mark.with_suffix(UNDER_WAY)
            under_way.write_text(text, encoding="utf-8")
            under_way.rename(self._mark.with_suffix(CHECKED if self._error is None else FAILED))
        except OSError:
            pass  # the trainer waits no longer

    def give(self, load: Load) -> set[str]:
        self._thread.join()
        if self._error is not None:
            raise TransferError(str(self._error)) from self._error
        given, tensors = set[str](), self._opened.tensors

        def each() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in tensors.items():
                given.add(name)
                yield name, tensor

        load(each())
        if missing := tensors.keys() - given:
            raise TransferError(f"{NOT_TAKEN} {len(missing)} tensors of {len(tensors)}, such as {min(missing)}")
        return given

    def close(self) -> None:
        self._ended = True
        if self._thread.ident is not None:
            self._thread.join()
        self._opened.close()
