"""Whether the client of `sampler: {type: server}` could be the limit: completions a second, checked and made into
rollouts, against a stub that answers at once. A server makes thousands of tokens a second; a client that handles far
more is not what anybody waits for.

    python benchmarks/sampler.py [--tokens 512] [--group 8] [--seconds 5]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence

from truestep.environments.prompts import Prompt
from truestep.generate.generator import DrawOptions
from truestep.generate.group_maker import Group, GroupMaker, GroupOptions
from truestep.generate.servers.fleet import Fleet
from truestep.generate.servers.vllm import Vllm

VOCABULARY = 1000


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answers: dict[str, bytes]) -> None:
    """HTTP as far as the client needs it: one prepared answer for every request."""
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
            writer.write(answers["group"])
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
        writer.close()


def answer(group: int, tokens: int) -> bytes:
    choice = {
        "token_ids": [5 + number % 900 for number in range(tokens)],
        "logprobs": {"token_logprobs": [-0.123456789] * tokens, "tokens": ["token"] * tokens},
        "finish_reason": "length",
        "text": "word " * tokens,
    }
    body = json.dumps({"choices": [choice | {"index": index} for index in range(group)]}).encode()
    return f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


async def measure(group: int, tokens: int, seconds: float) -> tuple[int, float]:
    """Completions made, and the seconds that they took."""
    answers = {"group": answer(group, tokens)}
    server = await asyncio.start_server(lambda r, w: serve(r, w, answers), "127.0.0.1", 0)
    client = Vllm(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "m", None, 60)
    fleet = Fleet([client], vocabulary_size=VOCABULARY, pause="wait", tolerance=1, on_void=lambda: None, on_fatal=print)
    (only,) = fleet.servers
    only.version, only.is_open = 0, True
    options = GroupOptions(group, 0, DrawOptions(1.0, tokens, frozenset({0})))
    maker = GroupMaker(options, rate, read)
    prompt = Prompt("a", "a", {}, tuple(range(5, 133)))
    made, start = 0, time.perf_counter()

    async def keep_making() -> None:
        nonlocal made
        while time.perf_counter() - start < seconds:
            await maker.make(Group(made, prompt), fleet.generate)
            made += group

    await asyncio.gather(*(keep_making() for _ in range(32)))
    elapsed = time.perf_counter() - start
    await client.close()
    server.close()
    return made, elapsed


async def rate(prompt: Prompt, text: str, seed: str) -> float:
    return 1.0


def read(tokens: Sequence[int]) -> str:
    return "text"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=5.0)
    arguments = parser.parse_args()
    for group in (1, arguments.group):
        made, seconds = asyncio.run(measure(group, arguments.tokens, arguments.seconds))
        print(
            f"{group} completions a request, {arguments.tokens} tokens each: {made / seconds:,.0f} completions/s, "
            f"{made * arguments.tokens / seconds:,.0f} tokens/s through one process, the stub included"
        )


if __name__ == "__main__":
    main()
