"""New weights from the GPUs of a trainer to a receiver's by NCCL: `publication.py --nccl`.

    torchrun --nproc-per-node 2 benchmarks/publication.py --nccl --layers 36 --hidden 4096 --intermediate 12288 \
        --vocabulary 151936 --heads 32 --untied --dtype bfloat16

The ranks that torchrun starts are the trainer: a random model of Qwen3's shape is sharded over them. The receiver
speaks the messages of vLLM's backend `nccl`, and copies what comes into a model's tensors. It has a GPU of its own
where the machine has one more than ranks. Else it shares the last rank's: as a thread of it, since a GPU runs two
processes in turns and not side by side. `--receiver process` has it be a process all the same. On a shared GPU it
enters the first broadcasts only after the sender has: what is loaded and made at a first use must not wait behind a
kernel that waits for its peer. `--noted` has all be so.

Printed are the rate of the link, by plain broadcasts of 1 GB in a group of the same two GPUs and by plain copies, the
seconds of a publication, and how many tensors arrived with the checksum of those that were drawn. `--device cpu` runs
the same with gloo.
"""

from __future__ import annotations

import argparse
import base64
import datetime
import json
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fits import drawn, made_up

from truestep.model.loading import load
from truestep.model.policy import Policy
from truestep.model.tensor_stream import TensorStream
from truestep.ranks.axes import RankLayout
from truestep.ranks.group import Ranks, join, leave
from truestep.weight_transfer import link
from truestep.weight_transfer.link import Sender, Sending
from truestep.weight_transfer.nccl import Nccl, NcclWire
from truestep.weight_transfer.packed import as_bytes, update_info

LINK = 10**9  # bytes of a plain broadcast
LIMIT = datetime.timedelta(seconds=120)
WARM_UP = 2  # publications
BLOCK = 2**24  # numbers of a checksum that are added up at a time


def write_config(directory: Path, given: argparse.Namespace) -> Path:
    from transformers import Qwen3Config

    Qwen3Config(
        architectures=["Qwen3ForCausalLM"], vocab_size=given.vocabulary, hidden_size=given.hidden,
        intermediate_size=given.intermediate, num_hidden_layers=given.layers, num_attention_heads=given.heads,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=32_768, tie_word_embeddings=not given.untied,
    ).save_pretrained(directory)  # fmt: skip
    return directory


def checksum(tensor: torch.Tensor) -> str:
    """Add up a tensor's words, and the same words with a weight that tells places apart."""
    words = tensor.reshape(-1).view({2: torch.int16, 4: torch.int32}[tensor.itemsize])
    plain = placed = 0
    for start in range(0, len(words), BLOCK):
        block = words[start : start + BLOCK].long()
        places = torch.arange(start, start + len(block), device=block.device) % 65_521 + 1
        plain += int(block.sum())
        placed += int((block * places).sum())
    return f"{plain}:{placed}:{list(tensor.shape)}:{tensor.dtype}"


class Messages:
    """Calls of a receiver, in the place of HTTP: what is asked, and what is answered when it is done."""

    def __init__(self, port: int, *, serves: bool = False):
        self._store = dist.TCPStore("127.0.0.1", port, is_master=serves, timeout=LIMIT, wait_for_workers=False)
        self._number = 0

    @property
    def port(self) -> int:
        return self._store.port

    def ask(self, call: str, **content: Any) -> Callable[[], Any]:
        """Call it, and give what waits for its answer."""
        number, self._number = self._number, self._number + 1
        self._store.set(f"ask/{number}", json.dumps([call, content]))

        def answer() -> Any:
            found = json.loads(self._store.get(f"answer/{number}"))
            if found[0] is not None:
                raise RuntimeError(found[0])
            return found[1]

        return answer

    def asked(self) -> tuple[str, dict[str, Any]]:
        call, content = json.loads(self._store.get(f"ask/{self._number}"))
        return call, content

    def answer(self, value: Any = None, error: str | None = None) -> None:
        self._store.set(f"answer/{self._number}", json.dumps([error, value]))
        self._number += 1


class Sent:
    """Has a receiver that shares a rank's GPU wait for a broadcast until the sender is in it: a kernel that waits there
    for its peer may keep back the rank's own kernels, for which the peer waits."""

    def __init__(self, port: int):
        self._store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=LIMIT, wait_for_workers=False)
        self._number = 0

    def note(self) -> None:
        self._store.set(f"sent/{self._number}", "")
        self._number += 1

    def wait(self) -> None:
        self._store.get(f"sent/{self._number}")
        self._number += 1


class NotedWire:
    """A wire whose messages are noted when they are sent, with all that they wait for done."""

    def __init__(self, wire: NcclWire, sent: Sent):
        self._wire, self._sent, self.device = wire, sent, wire.device
        self.noting = True

    def send(self, content: torch.Tensor) -> Sending:
        if not self.noting:
            return self._wire.send(content)
        torch.cuda.current_stream(self.device).synchronize()
        sending = self._wire.send(content)
        self._sent.note()
        return sending

    def close(self) -> None:
        self._wire.close()


class Receiver:
    """A server's rank: it joins, and reads packed tensors that were announced."""

    def __init__(self, device: torch.device, sent: Sent | None = None):
        self._device, self._model, self._sent = device, dict[str, torch.Tensor](), sent
        self._info: dict[str, Any] = {}
        self._group: Any = None
        self._nccl: Any = Nccl() if device.type == "cuda" else None
        self._link = torch.empty(0)
        self._streams: list[torch.cuda.Stream] = []

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._info = init_info
        if self._device.type == "cuda":
            self._streams = [torch.cuda.Stream(self._device) for _ in range(init_info["packed_num_buffers"])]
            identity = base64.b64decode(init_info["nccl_unique_id_b64"])
            self._group = self._nccl.join(identity, init_info["world_size"], init_info["rank_offset"])
            self._nccl.warm_up(self._group, torch.cuda.current_stream())
        else:
            self._group = gloo(init_info["port"], 1)

    def _receive(self, content: torch.Tensor) -> None:
        if self._sent is not None:
            self._sent.wait()
        if self._device.type == "cuda":
            self._nccl.broadcast(self._group, content, torch.cuda.current_stream())
        else:
            broadcast(self._group, content).wait()

    def receive_plain(self, size: int, times: int) -> None:
        if len(self._link) != size:
            self._link = torch.empty(size, dtype=torch.uint8, device=self._device)
        for _ in range(times):
            self._receive(self._link)
        self._synchronize()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._link = torch.empty(0)
        size, number = self._info["packed_buffer_size_bytes"], 0
        waiting: list[tuple[torch.Tensor, int]] = []
        total = 0
        rooms: list[torch.Tensor | None] = [None] * self._info["packed_num_buffers"]

        def take() -> None:
            nonlocal number
            slot = number % len(rooms)
            number += 1
            with torch.cuda.stream(self._streams[slot] if self._streams else None):
                if self._streams:
                    self._streams[slot].synchronize()
                rooms[slot] = None
                rooms[slot] = room = torch.empty(total, dtype=torch.uint8, device=self._device)
                self._receive(room)
                for (place, _), part in zip(waiting, room.split([count for _, count in waiting]), strict=True):
                    as_bytes(place).copy_(part)

        listed = zip(update_info["names"], update_info["dtype_names"], update_info["shapes"], strict=True)
        for name, dtype_name, shape in listed:
            if name not in self._model:
                self._model[name] = torch.empty(shape, dtype=getattr(torch, dtype_name), device=self._device)
            place = self._model[name]
            waiting.append((place, place.nbytes))
            total += place.nbytes
            if total > size:
                take()
                waiting, total = [], 0
        if total:
            take()
        self._synchronize()

    def run_freely(self) -> None:
        """Enter broadcasts without waiting for the sender from now on."""
        self._sent = None

    def clear(self) -> None:
        """Forget all values, so that what a checksum finds has come since."""
        for tensor in self._model.values():
            tensor.zero_()
        self._synchronize()

    def checksums(self) -> dict[str, str]:
        return {name: checksum(tensor) for name, tensor in self._model.items()}

    def close(self) -> None:
        if self._nccl is not None:
            self._nccl("ncclCommDestroy", self._group)
        self._group = None

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def receive(port: int, device: str, own_process: bool, noted: bool) -> None:
    place = torch.device(device)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    if own_process:
        torch.set_num_threads(1)
    messages, receiver = Messages(port), Receiver(place, Sent(port) if noted else None)
    while True:
        call, content = messages.asked()
        try:
            value = getattr(receiver, call)(**content)
        except Exception as error:
            messages.answer(error=f"{type(error).__name__}: {error}")
            return
        messages.answer(value)
        if call == "close":
            return


def gloo(port: int, rank: int) -> Any:
    store = dist.TCPStore("127.0.0.1", port, timeout=LIMIT, wait_for_workers=False)
    return dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, 2, LIMIT)


def broadcast(group: Any, content: torch.Tensor) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    return group.broadcast([content], options)


class GlooWire:
    device = torch.device("cpu")

    def __init__(self, port: int):
        self._port = port
        self._group: Any = None

    def init_info(self, ranks: int, chunk: int) -> dict[str, Any]:
        return {"port": self._port, "packed_buffer_size_bytes": chunk, "packed_num_buffers": 2}

    def join(self, ranks: int) -> None:
        self._group = gloo(self._port, 0)

    def send(self, content: torch.Tensor) -> Sending:
        sending: Sending = broadcast(self._group, content)
        return sending

    def close(self) -> None:
        self._group = None


def done(sending: Sending) -> None:
    while not sending.is_completed():
        pass


def link_rate(messages: Messages, wire: NcclWire | GlooWire | NotedWire, size: int) -> float:
    """Measure plain broadcasts, in bytes a second: many in a row, as a whole publication's."""
    content = torch.ones(size, dtype=torch.uint8, device=wire.device)
    seconds = []
    times = 8
    for _ in range(4):
        answer = messages.ask("receive_plain", size=size, times=times)
        done(wire.send(content))  # both are there
        start = time.perf_counter()
        for _ in range(times - 2):
            last = wire.send(content)
        done(last)
        seconds.append((time.perf_counter() - start) / (times - 2))
        done(wire.send(content))
        answer()
    return size / statistics.median(seconds[1:])


def copy_rate(source: torch.device, target: torch.device) -> float:
    """Measure plain copies from GPU to GPU, in bytes a second."""
    content = torch.ones(LINK, dtype=torch.uint8, device=source)
    room = torch.empty_like(content, device=target)
    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        room.copy_(content)
        torch.cuda.synchronize(source)
        torch.cuda.synchronize(target)
        seconds.append(time.perf_counter() - start)
    return LINK / statistics.median(seconds[1:])


def publish(stream: TensorStream, sender: Sender | None, messages: Messages | None, ranks: Ranks) -> float:
    """Publish once; the seconds from weights that are there to a receiver that has them all."""
    dist.barrier(group=ranks.host)
    start = time.perf_counter()
    if sender is None or messages is None:
        stream.give(lambda tensors: None)
        return 0.0
    answer = messages.ask("update_weights", update_info=update_info(stream.entries))
    sender.begin(stream.entries)
    stream.give(sender.add)
    sender.finish()
    answer()
    return time.perf_counter() - start


def measure(policy: Policy, given: argparse.Namespace, messages: Messages | None, target: str) -> None:
    """What the first rank measures, with the others' help."""
    ranks, dtype = policy.weights.ranks, getattr(torch, given.dtype)
    start = time.perf_counter()
    stream = TensorStream(policy, dtype)
    if messages is None:
        for _ in range(given.repeat + WARM_UP + 1):
            publish(stream, None, None, ranks)
        ranks.share(lambda: None)
        return
    print(f"names and shapes without values: {time.perf_counter() - start:.2f} s", flush=True)
    cuda = given.device == "cuda"
    wire: NcclWire | GlooWire | NotedWire = NcclWire(policy.device) if cuda else GlooWire(messages.port)
    start = time.perf_counter()
    answer = messages.ask("init_weight_transfer_engine", init_info=wire.init_info(1, given.chunk))
    with ThreadPoolExecutor(1) as waiting:
        link.join(wire, 1, waiting.submit(answer), LIMIT.total_seconds())
    print(f"joined in {time.perf_counter() - start:.2f} s", flush=True)
    if isinstance(wire, NcclWire) and target == f"cuda:{ranks.size - 1}":
        wire = NotedWire(wire, Sent(messages.port))
    rates = {"plain broadcasts": link_rate(messages, wire, LINK if cuda else LINK // 20)}
    if cuda and target != str(policy.device):
        rates["plain copies"] = copy_rate(policy.device, torch.device(target))
    for name, rate in rates.items():
        print(f"the link by {name}: {rate / 1e9:.1f} GB/s", flush=True)
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    sender = Sender(wire, given.chunk)
    size = sum(entry.nbytes for entry in stream.entries)
    seconds = []
    for number in range(given.repeat + WARM_UP + 1):
        if number == WARM_UP and isinstance(wire, NotedWire) and not given.noted:
            messages.ask("run_freely")()
            wire.noting = False
        if number == given.repeat + WARM_UP:
            messages.ask("clear")()
        seconds.append(publish(stream, sender, messages, ranks))
        print(f"publication {number}: {seconds[-1]:.3f} s", flush=True)
    middle = statistics.median(seconds[WARM_UP:-1])
    print(f"{size / 1e9:.2f} GB in {middle:.3f} s, the median of {given.repeat}: {size / middle / 1e9:.1f} GB/s")
    for name, rate in rates.items():
        print(f"{size / middle / rate:.0%} of the link by {name}")
    if cuda:
        most = torch.cuda.max_memory_allocated() - before
        print(f"memory of rank 0's GPU grew by {most / 2**30:.2f} GiB meanwhile")
    found = messages.ask("checksums")()
    equal = 0
    for entry in stream.entries:
        tied = entry.name == "lm_head.weight" and policy.facts.tied
        name = "model.embed_tokens.weight" if tied else entry.name
        right = checksum(drawn(name, entry.shape, policy.device).to(entry.dtype))
        equal += found[entry.name] == right
    print(f"checksums equal to those of what was drawn: {equal} of {len(stream.entries)}", flush=True)
    answer = messages.ask("close")  # who leaves a group waits for the others to leave
    wire.close()
    answer()
    ranks.share(lambda: None)
    if equal != len(stream.entries) or len(found) != equal:
        raise SystemExit("not all that arrived is what was drawn")


def run(given: argparse.Namespace) -> None:
    began = time.monotonic()
    size = int(os.environ["WORLD_SIZE"])
    ranks = join(RankLayout(data_shard=size), device=given.device, stall_timeout=120)
    cuda = given.device == "cuda"
    load.read_directory = partial(made_up, given.device)  # type: ignore[assignment]
    with tempfile.TemporaryDirectory() as folder:
        path = write_config(Path(folder) / "model", given)
        policy = load.load_policy(path, dtype=given.dtype if cuda else "float32", device=given.device, ranks=ranks)
    if cuda:
        torch.cuda.empty_cache()
    spare = cuda and torch.cuda.device_count() > size
    target = f"cuda:{size if spare else size - 1}" if cuda else "cpu"
    as_process = {"process": True, "thread": False, "auto": spare or not cuda}[given.receiver]
    messages = Messages(0, serves=True) if ranks.first else None
    port = ranks.share(lambda: messages.port if messages else 0)
    if ranks.first:
        name = f", {torch.cuda.get_device_name()}" if cuda else ""
        count = sum(piece.shape.numel() for piece in policy.weights.pieces.values())
        print(f"{count / 1e9:.2f}B weights over {size} ranks after {time.monotonic() - began:.0f} s{name}")
        kind = "process" if as_process else "thread"
        print(f"torch {torch.__version__}; the receiver is a {kind} on {target}", flush=True)
    waiting: Any = None
    if ranks.rank == size - 1:
        if as_process:
            context = multiprocessing.get_context("spawn")
            waiting = context.Process(target=receive, args=(port, target, True, cuda and not spare), daemon=True)
        else:
            waiting = threading.Thread(target=receive, args=(port, target, False, cuda and not spare), daemon=True)
        waiting.start()
    measure(policy, given, messages, target)
    if waiting is not None:
        waiting.join(30)
    if ranks.first:
        print(f"{time.monotonic() - began:.0f} s in all", flush=True)
    leave()
