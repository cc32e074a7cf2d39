"""Messages of a real Redis server: each given once to what lives, and again to what died, in the stream's order."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Any

import pytest

from stream.redis_server import RedisServer, needs_redis
from truestep.errors import TruestepError
from truestep.rollouts.source import SourceError
from truestep.rollouts.stream.owned import OwnedTransport
from truestep.rollouts.stream.redis import RedisTransport
from truestep.rollouts.stream.transport import TransportError

pytestmark = needs_redis


class RunLostError(TruestepError):
    """Stands for the error of a run's directory that another process locked."""


def transport(server: RedisServer, **options: Any) -> RedisTransport:
    defaults = {"url": server.url, "stream": "s", "group": "truestep", "consumer": "trainer"}
    return RedisTransport(**(defaults | options))


def payloads(reader: RedisTransport, count: int = 100, seconds: float = 0.01) -> list[str]:
    return [message.payload.decode() for message in reader.fetch(count, seconds) if not message.blank]


def restored(server: RedisServer, state: dict[str, Any], **options: Any) -> RedisTransport:
    """Another process that starts from a checkpoint."""
    again = transport(server, **options)
    again.restore(state)
    again.acknowledge(state)
    return again


def test_messages_come_in_the_order_they_were_sent(redis_server: RedisServer) -> None:
    ids = redis_server.send("s", list("abc"))
    reader = transport(redis_server)
    first = reader.fetch(2, 1.0)
    assert [message.payload for message in first] == [b"a", b"b"]
    assert [(message.where, message.file, message.line) for message in first] == [
        (f"s:{identifier}", f"s:{identifier}", 1) for identifier in ids[:2]
    ]
    redis_server.send("s", ["d"])
    assert payloads(reader) == ["c", "d"]
    assert payloads(reader, seconds=0.2) == []
    sender = threading.Timer(0.2, redis_server.send, ("s", ["e"]))
    sender.start()
    assert payloads(reader, seconds=1000) == ["e"], "it waits for what comes"
    sender.join()


def test_nothing_is_acknowledged_before_it_is_said_to_be(redis_server: RedisServer) -> None:
    ids = redis_server.send("s", list("abcde"))
    reader = transport(redis_server)
    payloads(reader, 3)
    checkpoint = reader.state()
    payloads(reader, 1)
    assert redis_server.pending("s") == ids[:4]
    reader.acknowledge(checkpoint)
    assert redis_server.pending("s") == ids[3:4]


def test_what_was_read_and_not_acknowledged_comes_again_in_its_order(redis_server: RedisServer) -> None:
    redis_server.send("s", list("abcdef"))
    dead = transport(redis_server)
    payloads(dead, 2)
    checkpoint = dead.state()
    dead.acknowledge(checkpoint)
    payloads(dead, 2)
    again = restored(redis_server, checkpoint)
    assert payloads(again) == ["c", "d", "e", "f"]


def test_a_run_without_a_checkpoint_gets_all_that_was_never_acknowledged(redis_server: RedisServer) -> None:
    redis_server.send("s", list("abcd"))
    dead = transport(redis_server)
    payloads(dead, 3)
    assert payloads(transport(redis_server)) == ["a", "b", "c", "d"]


def test_a_kill_between_the_checkpoint_and_its_acknowledgement(redis_server: RedisServer) -> None:
    redis_server.send("s", list("abcd"))
    dead = transport(redis_server)
    payloads(dead, 3)
    again = restored(redis_server, dead.state())  # the dead one never acknowledged
    assert redis_server.pending("s") == []
    assert payloads(again) == ["d"]


def test_an_older_checkpoint_gets_what_a_newer_one_acknowledged(redis_server: RedisServer) -> None:
    redis_server.send("s", list("abcd"))
    reader = transport(redis_server)
    payloads(reader, 1)
    older = reader.state()
    payloads(reader, 2)
    reader.acknowledge(reader.state())
    assert payloads(restored(redis_server, older)) == ["b", "c", "d"]


class _Lossy:
    """In front of the server: a reply in which `loses` stands is not passed on, and its connection ends there."""

    def __init__(self, server: RedisServer):
        self.loses: bytes | None = None
        self._server = server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._server.port))
            threading.Thread(target=self._pass, args=(client, server), daemon=True).start()
            threading.Thread(target=self._pass, args=(server, client), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if self.loses is not None and self.loses in data:
                    self.loses = None
                    break
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()


def test_a_reply_that_was_lost_is_given_again(redis_server: RedisServer) -> None:
    proxy = _Lossy(redis_server)
    redis_server.send("s", list("abcd"))
    reader = transport(redis_server, url=proxy.url)
    assert payloads(reader, 1) == ["a"]
    proxy.loses = b"$1\r\nc\r\n"
    with pytest.raises(TransportError):
        payloads(reader, 2)
    assert len(redis_server.pending("s")) == 3, "the server believes that they arrived"
    assert payloads(reader) == ["b", "c", "d"]
    proxy.close()


def test_an_acknowledgement_that_fails_costs_no_document(redis_server: RedisServer) -> None:
    proxy = _Lossy(redis_server)
    redis_server.send("s", ["a"])
    reader = transport(redis_server, url=proxy.url)
    assert payloads(reader) == ["a"]
    redis_server.send("s", ["b"])
    redis_server.end("s")
    proxy.loses = b":1\r\n"  # to XACK, in the call that reads the last documents
    assert payloads(reader) == ["b"]
    assert proxy.loses is None
    assert reader.ended
    proxy.close()


def test_the_server_is_gone_and_comes_back(redis_server: RedisServer) -> None:
    redis_server.send("s", list("ab"))
    reader = transport(redis_server)
    assert payloads(reader, 1) == ["a"]
    held = reader.state()
    redis_server.kill()
    with pytest.raises(TransportError, match=r"stream 's' of redis at 127\.0\.0\.1:\d+ cannot be read"):
        payloads(reader)
    reader.acknowledge(held)  # said later
    reader.announce({"event": "weights_ready", "step": 3})
    redis_server.start()
    assert payloads(reader) == ["b"]
    assert len(redis_server.pending("s")) == 1
    assert redis_server.events("s:events") == [{"event": "weights_ready", "step": "3"}]


def test_a_server_that_lost_everything(redis_server: RedisServer) -> None:
    redis_server.send("s", list("ab"))
    reader = transport(redis_server)
    assert payloads(reader) == ["a", "b"]
    redis_server.client.flushall()
    redis_server.send("s", ["c"])
    with pytest.raises(TransportError, match="NOGROUP"):
        payloads(reader)
    assert payloads(reader) == ["c"]


def test_a_stream_made_anew_is_hinted_at(redis_server: RedisServer) -> None:
    redis_server.client.xadd("s", {"record": "a"}, id="99999999999999-0")
    reader = transport(redis_server)
    assert payloads(reader) == ["a"]
    assert reader.hint() is None
    redis_server.client.flushall()
    redis_server.send("s", ["b"])
    assert "created again" in (reader.hint() or "")


def test_a_message_deleted_before_it_was_trained_on_is_not_lost_in_silence(redis_server: RedisServer) -> None:
    ids = redis_server.send("s", list("abc"))
    dead = transport(redis_server)
    payloads(dead, 2)
    redis_server.client.xdel("s", ids[1])
    again = transport(redis_server)
    gone = again.fetch(100, 0.01)
    assert [(message.file, message.problem) for message in gone] == [
        (f"s:{ids[1]}", "it was deleted from the stream before it was trained on")
    ]
    assert payloads(again) == ["a", "c"]
    again.acknowledge(again.state())
    assert redis_server.pending("s") == []


def test_an_entry_without_a_record(redis_server: RedisServer) -> None:
    redis_server.client.xadd("s", {"data": "{}"})
    assert [message.problem for message in transport(redis_server).fetch(1, 0.01)] == [
        "the entry has no field 'record'"
    ]


@pytest.mark.parametrize("fields", [{"event": "end"}, {"record": '{"event": "end"}'}])
def test_the_end(redis_server: RedisServer, fields: dict[str, str]) -> None:
    redis_server.send("s", ["a"])
    redis_server.client.xadd("s", fields)
    redis_server.send("s", ["behind it"])
    reader = transport(redis_server)
    assert payloads(reader) == ["a"]
    assert reader.ended
    held = reader.state()
    reader.acknowledge(held)
    again = restored(redis_server, held)
    assert again.ended


def test_the_end_comes_again_for_a_checkpoint_made_before_it(redis_server: RedisServer) -> None:
    redis_server.send("s", ["a"])
    reader = transport(redis_server)
    payloads(reader)
    before = reader.state()
    redis_server.end("s")
    assert payloads(reader) == []
    assert reader.ended
    assert len(redis_server.pending("s")) == 1, "of a later run of this group, the end is no message"
    again = restored(redis_server, before)
    assert not again.ended
    assert payloads(again) == []
    assert again.ended


def test_a_record_that_only_mentions_an_end_is_a_record(redis_server: RedisServer) -> None:
    redis_server.send("s", ['{"event": "endless"}', '{"event"'])
    reader = transport(redis_server)
    assert len(payloads(reader)) == 2
    assert not reader.ended


def test_two_runs_cannot_share_a_group(redis_server: RedisServer) -> None:
    redis_server.send("s", list("ab"))
    other = transport(redis_server, consumer="elsewhere")
    payloads(other, 1)
    with pytest.raises(SourceError, match="the consumer 'elsewhere' of the group 'truestep' has 1 messages"):
        payloads(transport(redis_server))
    assert payloads(transport(redis_server, group="mine")) == ["a", "b"]
    assert payloads(transport(redis_server, consumer="elsewhere")) == ["a", "b"]


def test_another_stream_than_the_checkpoints(redis_server: RedisServer) -> None:
    state = transport(redis_server, stream="before").state()
    with pytest.raises(SourceError, match="made from the stream 'before', not from the stream 's'"):
        transport(redis_server).restore(state)
    with pytest.raises(SourceError, match="made from the files of a watched directory"):
        transport(redis_server).restore({"files": {}})


def test_a_run_of_another_group_goes_on_from_its_checkpoint(redis_server: RedisServer) -> None:
    redis_server.send("s", list("abc"))
    reader = transport(redis_server)
    payloads(reader, 2)
    assert payloads(restored(redis_server, reader.state(), group="renamed")) == ["c"]


def test_many_pending_messages_are_acknowledged_in_pages(redis_server: RedisServer) -> None:
    redis_server.send("s", map(str, range(1234)))
    dead = transport(redis_server)
    assert len(payloads(dead, 2000)) == 1234
    restored(redis_server, dead.state())
    assert redis_server.pending("s") == []


def test_no_server_is_said_at_once(redis_server: RedisServer) -> None:
    redis_server.kill()
    with pytest.raises(SourceError, match=r"data.source.url: redis at 127\.0\.0\.1:\d+ cannot be used: .*refused"):
        transport(redis_server)


def test_what_is_no_stream_is_said_at_once(redis_server: RedisServer) -> None:
    redis_server.client.set("s", "text")
    with pytest.raises(SourceError, match=r"data.source.stream: .* is not a stream: it holds a string"):
        transport(redis_server)
    with pytest.raises(SourceError, match="data.source.url: Redis URL must specify"):
        transport(redis_server, url="localhost:6379")


def test_a_password_of_the_environment(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    redis_server.client.config_set("requirepass", "secret")
    with pytest.raises(SourceError, match="Authentication required"):
        transport(redis_server)
    monkeypatch.setenv("REDISCLI_AUTH", "secret")
    assert "secret" not in transport(redis_server).name
    monkeypatch.setenv("REDISCLI_AUTH", "other")
    assert "secret" not in transport(redis_server, url=redis_server.url.replace("//", "//:secret@")).name


def test_last_words_that_nobody_hears_end_with_a_warning(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("truestep.rollouts.stream.redis._LAST_WORDS", 0.1)
    reader = transport(redis_server)
    redis_server.kill()
    reader.announce({"event": "training_finished"})
    with pytest.warns(UserWarning, match="not announced: training_finished"):
        reader.close()


def test_a_process_whose_run_was_taken_over_takes_nothing_from_it(redis_server: RedisServer) -> None:
    lost: list[str] = []

    def fence() -> None:
        if lost:
            raise RunLostError("another process writes the run")

    kept = transport(redis_server)
    old = OwnedTransport(kept, fence)
    redis_server.send("s", list("abcdef"))
    assert len(old.fetch(4, 0.2)) == 4
    checkpoint = old.state()
    old.acknowledge(checkpoint)
    lost.append("its machine stands still")
    new = restored(redis_server, checkpoint)
    assert payloads(new) == ["e", "f"]
    redis_server.send("s", list("gh"))
    pending = redis_server.pending("s")
    for ask in (
        lambda: old.fetch(4, 0.2),
        lambda: old.acknowledge(new.state()),
        lambda: old.announce({"event": "training_finished"}),
    ):
        with pytest.raises(RunLostError):
            ask()
    old.close()
    assert redis_server.pending("s") == pending, "nothing is given back"
    assert payloads(new) == ["g", "h"] and payloads(new, seconds=0.1) == []


def test_a_run_that_ends_gives_back_what_it_holds(redis_server: RedisServer) -> None:
    redis_server.send("s", list("abc"))
    reader = OwnedTransport(transport(redis_server), lambda: None)
    reader.fetch(1, 0.2)
    reader.acknowledge(reader.state())
    reader.fetch(1, 0.2)
    reader.close()
    assert redis_server.pending("s") == []
    assert payloads(transport(redis_server)) == ["b", "c"]
