"""A transport over a Redis stream, read through a consumer group that belongs to one run.

The run keeps its own place in the stream, and sets the group back to it on every new connection. The server therefore
delivers again, in stream order, the messages that went to a killed process or were in a lost reply.
"""

import json
import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from truestep.files.bounded import RECORD, too_long
from truestep.rollouts.source import SourceError, other_source
from truestep.rollouts.stream.transport import Message, TransportError
from truestep.text import keep_secret, printable

try:
    import redis
    from redis.backoff import NoBackoff
    from redis.exceptions import ResponseError
    from redis.retry import Retry
except ImportError as error:
    raise SourceError("data.source.type: stream needs `pip install 'truestep[redis]'`") from error

_RECORD, _EVENT, _END = b"record", b"event", b"end"
_SERVER_SILENT = 10.0  # socket timeout in seconds
_PATIENCE = 20.0  # seconds for a complete reply, because a server that sends slowly never reaches the socket timeout
_PAGE = 500
_REPLY = 2 * RECORD  # largest reply in bytes
# Lua scripts that return only ids, because entries may be of any size. `_NEXT` returns the id of the next entry, and
# `_GONE` those of the given ids whose entries were deleted.
_NEXT = "return redis.call('XRANGE', KEYS[1], ARGV[1], '+', 'COUNT', 1)[1][1]"
_GONE = """local gone = {}
for _, id in ipairs(ARGV) do
  if #redis.call('XRANGE', KEYS[1], id, id) == 0 then gone[#gone + 1] = id end
end
return gone"""
_LAST_WORDS = 5.0  # seconds that `close` retries sending events


class RedisTransport:
    def __init__(self, *, url: str, stream: str, group: str, consumer: str, events: str | None = None):
        self._stream, self._group, self._consumer = stream, group, consumer
        self._events = events or f"{stream}:events"
        self._client = _connect(url)
        self.name = f"the stream {stream!r} of {_address(self._client)}"
        self.ended = False
        self._position: str | None = None  # id of the last fetched message
        self._checkpointed: str | None = None  # id of the last message in a complete checkpoint
        self._joined = False
        self._ours = False  # this run set the group's place, and no other consumer has pending messages
        self._pending: list[str] = []  # ids that were delivered and not acknowledged
        self._end: str | None = None  # id of the message that ended the data, until it is acknowledged
        self._deleted: list[str] = []  # pending ids whose entries were deleted from the stream
        self._reported: set[str] = set()  # deleted ids that were reported as rejected
        self._outbox: deque[dict[str, Any]] = deque()
        self._one_by_one = 0  # number of entries still to be read one by one
        self._lock = threading.RLock()  # guards the fields above; not held while waiting for messages
        self._check()

    def _check(self) -> None:
        try:
            kind = self._within(lambda: self._client.type(self._stream).decode())
        except Exception as error:  # the server may not be Redis and answer anything
            raise SourceError(f"data.source.url: {_address(self._client)} cannot be used: {_said(error)}") from error
        if kind not in ("stream", "none"):
            raise SourceError(f"data.source.stream: {self.name} is not a stream: it holds a {kind}")

    def fetch(self, count: int, seconds: float) -> list[Message]:
        try:
            with self._lock:
                self._join()
                self._send()
                if self._deleted:
                    return self._report_deleted()
            return self._next(count, seconds)
        except SourceError:
            raise
        except Exception as error:  # the server may not be Redis and answer anything
            self._joined = False
            raise TransportError(f"{self.name} cannot be read: {_said(error)}") from error

    def _next(self, count: int, seconds: float) -> list[Message]:
        """Read the next entries; if a reply is too large, read the next ones one by one."""
        try:
            wait = max(1, int(1000 * seconds))  # milliseconds; 0 would wait forever
            entries = self._read(1 if self._one_by_one else count, wait)
        except _ReplyTooLargeError:
            with self._lock:
                self._joined = False
                self._join()
                if self._one_by_one:
                    return [self._unread()]
            self._one_by_one = count
            return []
        with self._lock:
            self._one_by_one = max(0, self._one_by_one - 1)
            return self._messages(entries)

    def _unread(self) -> Message:
        """Skip the next entry, which is too large to read, and return a message that rejects it."""
        identifier = self._client.eval(_NEXT, 1, self._stream, f"({self._position}").decode()
        self._client.xgroup_setid(self._stream, self._group, identifier)
        self._position = identifier
        self._pending.append(identifier)
        return self._message(identifier, b"", f"the record is not read: {too_long(_REPLY)}", mark=[identifier, False])

    def _read(self, count: int, wait: int) -> list[tuple[str, dict[bytes, bytes]]]:
        replies = self._client.xreadgroup(self._group, self._consumer, {self._stream: ">"}, count=count, block=wait)
        return [(identifier.decode(), fields) for _, entries in replies for identifier, fields in entries]

    def _messages(self, entries: list[tuple[str, dict[bytes, bytes]]]) -> list[Message]:
        messages: list[Message] = []
        for identifier, fields in entries:
            self._pending.append(identifier)
            if self._position is not None and _order(identifier) <= _order(self._position):
                continue  # already read: the server was restored from an older copy
            self._position = identifier
            if _is_end(fields):
                # Acknowledged now, so that a later run with this group does not find it. This run's checkpoints hold
                # their own place.
                self._end, self.ended = identifier, True
                self._try_to_send()
                messages.append(self._message(identifier, b"", None, mark=[identifier, True], blank=True))
                break
            problem = None if _RECORD in fields else f"the entry has no field {_RECORD.decode()!r}"
            messages.append(self._message(identifier, fields.get(_RECORD, b""), problem, mark=[identifier, False]))
        return messages

    def _message(
        self, identifier: str, payload: bytes, problem: str | None, mark: Any = None, blank: bool = False
    ) -> Message:
        where = f"{self._stream}:{identifier}"
        return Message(where, where, 1, payload, problem, mark, blank)

    def advance(self, place: dict[str, Any], mark: Any) -> None:
        place["position"], place["ended"] = mark

    def _join(self) -> None:
        """Once per connection, set the group back to this run's place and read the group's pending ids."""
        if self._joined:
            return
        position = self._position or self._place_of_group()
        try:
            self._client.xgroup_create(self._stream, self._group, id=position, mkstream=True)
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise
            self._refuse_other_consumers()
            self._client.xgroup_setid(self._stream, self._group, position)
        self._ours = True
        self._position = position
        pending = list(self._all_pending())
        self._pending = [identifier for identifier in pending if _order(identifier) <= _order(position)]
        beyond = [identifier for identifier in pending if _order(identifier) > _order(position)]
        self._deleted = [item for item in self._find_deleted(beyond) if item not in self._reported]
        self._joined = True

    def _place_of_group(self) -> str:
        """Return the place where a run without a checkpoint begins: before the first unacknowledged message."""
        if not self._client.exists(self._stream):
            return "0-0"
        groups = {group["name"].decode(): group for group in self._client.xinfo_groups(self._stream)}
        if self._group not in groups:
            return "0-0"
        first_pending = self._client.xpending(self._stream, self._group)["min"]
        if first_pending is not None:
            return _before(first_pending.decode())
        return str(groups[self._group]["last-delivered-id"].decode())

    def _refuse_other_consumers(self) -> None:
        for consumer in self._client.xinfo_consumers(self._stream, self._group):
            name = consumer["name"].decode()
            if name != self._consumer and consumer["pending"]:
                self._ours = False
                raise SourceError(
                    f"data.source.group: the consumer {name!r} of the group {self._group!r} has {consumer['pending']} "
                    f"messages of {self.name} that are not acknowledged. Two runs cannot share a group: give this one "
                    f"a group of its own, or data.source.consumer: {name} to go on in the other's place"
                )

    def _all_pending(self) -> Iterator[str]:
        start = "-"
        while page := self._client.xpending_range(self._stream, self._group, start, "+", _PAGE):
            yield from (entry["message_id"].decode() for entry in page)
            start = f"({page[-1]['message_id'].decode()}"

    def _find_deleted(self, pending: list[str]) -> Iterator[str]:
        """Yield the ids of pending messages that were deleted from the stream."""
        for start in range(0, len(pending), _PAGE):
            yield from map(bytes.decode, self._client.eval(_GONE, 1, self._stream, *pending[start : start + _PAGE]))

    def _report_deleted(self) -> list[Message]:
        deleted, self._deleted = self._deleted, []
        self._reported.update(deleted)
        self._pending += deleted
        problem = "it was deleted from the stream before it was trained on"
        return [self._message(identifier, b"", problem) for identifier in deleted]

    def _within(self, ask: Callable[[], str]) -> str:
        """Return the server's reply to `ask`. Raises `TransportError` if none is complete after `_PATIENCE` seconds."""
        asked: Future[str] = Future()

        def answer() -> None:
            try:
                asked.set_result(ask())
            except BaseException as error:
                asked.set_exception(error)

        threading.Thread(target=answer, daemon=True).start()
        try:
            return asked.result(_PATIENCE)
        except FutureTimeout:
            self._client.connection_pool.disconnect()
            raise TransportError(f"no whole answer came within {_PATIENCE:g} s") from None

    def acknowledge(self, state: dict[str, Any]) -> None:
        self._checkpointed = state.get("position")
        self._send_now()

    def announce(self, event: dict[str, Any]) -> None:
        self._outbox.append(event)
        self._send_now()

    def _send_now(self) -> None:
        """Send events and acknowledgements, or leave them to the next fetch if the reading thread holds the lock."""
        if self._lock.acquire(timeout=_PATIENCE):
            try:
                self._try_to_send()
            finally:
                self._lock.release()

    def _try_to_send(self) -> bool:
        try:
            self._join()
            self._send()
        except SourceError:
            raise
        except Exception:
            self._joined = False
            return False
        return True

    def _send(self) -> None:
        while self._outbox:
            self._client.xadd(self._events, self._outbox[0])
            self._outbox.popleft()
        if self._end is not None:
            self._client.xack(self._stream, self._group, self._end)
            self._end = None
        if self._checkpointed is None or not self._pending:
            return
        held = _order(self._checkpointed)
        done = [identifier for identifier in self._pending if _order(identifier) <= held]
        for start in range(0, len(done), _PAGE):
            self._client.xack(self._stream, self._group, *done[start : start + _PAGE])
        self._pending = [identifier for identifier in self._pending if _order(identifier) > held]

    def state(self) -> dict[str, Any]:
        return {"stream": self._stream, "position": self._position, "ended": self.ended}

    def restore(self, state: dict[str, Any]) -> None:
        if state.get("stream") != self._stream:
            before = f"the stream {state['stream']!r}" if "stream" in state else "the files of a watched directory"
            raise other_source("data.source", before, f"the stream {self._stream!r}")
        self._position, self.ended = state["position"], state["ended"]

    def hint(self) -> str | None:
        try:
            last = self._within(lambda: self._client.xinfo_stream(self._stream)["last-generated-id"].decode())
        except Exception as error:
            return _said(error)
        if self._position is not None and _order(last) < _order(self._position):
            read = f"this run has read up to {self._position}"
            return f"the stream ends at {last} and {read}: it was created again, or the server's clock was set back"
        return None

    def interrupt(self) -> None:
        self._client.connection_pool.disconnect()

    def close(self) -> None:
        self._give_back()
        deadline = time.monotonic() + _LAST_WORDS
        while self._outbox and not self._try_to_send():
            if time.monotonic() > deadline:
                left = ", ".join(str(event["event"]) for event in self._outbox)
                warnings.warn(f"{self.name} cannot be reached: not announced: {left}", stacklevel=2)
                break
            time.sleep(0.2)
        self._client.close()

    def _give_back(self) -> None:
        """Set the group back to the last checkpoint, so that another consumer finds no pending messages.

        Failures are ignored, because every run sets the group to its own place when it starts.
        """
        # Uses a new connection if an interrupted fetch has closed the old one.
        if self._checkpointed is None or not self._ours or not self._lock.acquire(timeout=_PATIENCE):
            return
        held = _order(self._checkpointed)
        try:  # set back before acknowledging: after a kill in between, the first pending message marks the place
            self._client.xgroup_setid(self._stream, self._group, self._checkpointed)
            # Uses the server's list, because an interrupted reply may have delivered messages unknown to this process.
            beyond = [identifier for identifier in self._all_pending() if _order(identifier) > held]
            for start in range(0, len(beyond), _PAGE):
                self._client.xack(self._stream, self._group, *beyond[start : start + _PAGE])
            self._pending = []
        except Exception:
            self._joined = False
        finally:
            self._lock.release()


def _said(error: Exception) -> str:
    """Return the printable text of an error, which may quote the server."""
    return printable(error) if str(error) else type(error).__name__


def _connect(url: str) -> Any:
    password = os.environ.get("REDISCLI_AUTH")
    keep_secret(password)
    try:
        client = redis.Redis.from_url(
            url,
            password=password,  # from the environment, since runs log the URL
            retry=Retry(NoBackoff(), 0),  # repeating a command would not recover the messages of a lost reply
            socket_timeout=_SERVER_SILENT,
            socket_connect_timeout=_SERVER_SILENT / 2,
            protocol=2,
        )
        pool = client.connection_pool
        pool.connection_class = _bounded(pool.connection_class)
        return client
    except ValueError as error:
        raise SourceError(f"data.source.url: {printable(error)}") from error


class _ReplyTooLargeError(Exception):
    """A reply that exceeds `_REPLY` bytes."""


class _Counted:
    """A socket wrapper that raises `_ReplyTooLargeError` when a reply exceeds `_REPLY` bytes."""

    def __init__(self, socket: Any):
        self._socket, self.read = socket, 0

    def recv(self, *arguments: Any) -> bytes:
        content: bytes = self._socket.recv(*arguments)
        self._count(len(content))
        return content

    def recv_into(self, *arguments: Any) -> int:
        size: int = self._socket.recv_into(*arguments)
        self._count(size)
        return size

    def _count(self, size: int) -> None:
        self.read += size
        if self.read > _REPLY:
            raise _ReplyTooLargeError

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)


def _bounded(kind: Any) -> Any:
    """Return a connection class that limits the bytes of a reply."""

    class Bounded(kind):
        def _connect(self) -> _Counted:
            return _Counted(super()._connect())

        def send_packed_command(self, *arguments: Any, **options: Any) -> None:
            if isinstance(self._sock, _Counted):
                self._sock.read = 0
            super().send_packed_command(*arguments, **options)

    return Bounded


def _address(client: Any) -> str:
    """Return the server's address without the URL's password."""
    options = client.connection_pool.connection_kwargs
    if "path" in options:
        return f"redis at {options['path']}"
    return f"redis at {options.get('host', 'localhost')}:{options.get('port', 6379)}"


def _is_end(fields: dict[bytes, bytes]) -> bool:
    if fields.get(_EVENT) == _END:
        return True
    record = fields.get(_RECORD, b"")
    if len(record) > 100 or _EVENT not in record:
        return False
    try:
        return bool(json.loads(record) == {"event": "end"})
    except ValueError:
        return False


def _order(identifier: str) -> tuple[int, int]:
    milliseconds, _, number = identifier.partition("-")
    return int(milliseconds), int(number or 0)


def _before(identifier: str) -> str:
    milliseconds, number = _order(identifier)
    return f"{milliseconds}-{number - 1}" if number else f"{milliseconds - 1}-{2**64 - 1}"
