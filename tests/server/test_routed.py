"""The experts that servers return: vLLM's `.npy` files, SGLang's integers, and runs that replay them.

vLLM's build for CPUs cannot return experts, so the runs are with servers that speak as vLLM and SGLang do.
"""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from server.fake import FakeServer, asked
from server.fake_vllm import FakeVllm
from server.models import make_mixture, make_model
from server.runs import Recorder, server_config
from server.sglang_server import FakeSglang, serving
from server.vllm_server import NAME
from small_runs import quiet_trainer, read_lines
from truestep.files.bounded import MIB
from truestep.generate.errors import BadAnswerError, ServerError
from truestep.generate.generator import Completion
from truestep.generate.servers.check_answer import complete
from truestep.generate.servers.fleet import Fleet
from truestep.generate.servers.http import HttpServer
from truestep.generate.servers.routed import bytes_of_routes, read_integers, read_npy
from truestep.generate.servers.sglang import Sglang
from truestep.generate.servers.vllm import Vllm
from truestep.model.loading.load import load_policy
from truestep.rollouts.source import SourceError
from truestep.run.trainer import TrainingError
from truestep.tools.parity.sample import sample
from truestep.types import ROUTES, RouteShape

SHAPE = RouteShape((8, 8), 3, name="TinyMoe", numbers=(1, 3), layers=4)
TOKENS = 6


def routes(rows: int = TOKENS - 1, layers: int = 4, chosen: int = 3, experts: int = 8) -> np.ndarray:
    generator = np.random.default_rng(0)
    return np.argsort(generator.random((rows, layers, experts)), axis=-1)[..., :chosen]


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def file_of(values: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, values)
    return file.getvalue()


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32])
@pytest.mark.parametrize("experts", [8, 256, 300])
def test_layers_that_route_are_selected(dtype: Any, experts: int) -> None:
    shape = replace(SHAPE, experts=(experts,) * 2)
    values = routes(experts=min(experts, np.iinfo(dtype).max + 1)).astype(dtype)
    found = read_npy(text(file_of(values)), shape, TOKENS)
    assert found is not None and np.array_equal(found, values[:, [1, 3]])
    assert found.dtype == (np.uint8 if experts <= 256 else np.uint16)
    found = read_integers(text(values.astype("<i4").tobytes()), shape, TOKENS)
    assert found is not None and np.array_equal(found, values[:, [1, 3]])


def test_an_answer_without_experts_has_none() -> None:
    for read in (read_npy, read_integers):
        assert read(None, SHAPE, TOKENS) is None and read("x", None, TOKENS) is None


RIGHT = file_of(routes().astype(np.uint8))
HEAD = RIGHT.index(b"\n") + 1


def with_header(old: bytes, new: bytes) -> bytes:
    """Keeps the header's length where the new text is no longer."""
    padded = new + b" " * (len(old) - len(new))
    return RIGHT.replace(old, padded, 1)


HOSTILE = {
    "no text": ({"a": 1}, "no base64 text"),
    "no base64": ("%%%", "no base64 text"),
    "not ASCII": ("é" * 8, "no base64 text"),
    "nothing behind its magic": (text(RIGHT[:6]), "no .npy file"),
    "another magic": (text(b"PK\x03\x04" + RIGHT), "no .npy file"),
    "version 2": (text(RIGHT[:6] + b"\x02" + RIGHT[7:]), "no .npy file"),
    "a header without end": (text(RIGHT[: HEAD - 1]), "no .npy file"),
    "a header with code": (text(with_header(b"(5, 4, 3)", b"(9**9999)")), "no .npy file"),
    "objects": (text(with_header(b"'|u1'", b"'|O'")), "no .npy file"),
    "floats": (text(file_of(routes().astype(np.float32))), "no .npy file"),
    "the other byte order": (text(file_of(routes().astype(">u2"))), "no .npy file"),
    "column by column": (text(file_of(np.asfortranarray(routes().astype(np.uint8)))), "no .npy file"),
    "two dimensions": (text(file_of(routes().astype(np.uint8)[0])), "no .npy file"),
    "four dimensions": (text(file_of(routes().astype(np.uint8)[None])), "no .npy file"),
    "a negative size": (text(with_header(b"(5, 4, 3)", b"(-5, 4, 3")), "no .npy file"),
    "a size of twelve digits": (text(RIGHT.replace(b"(5, 4, 3), }      ", b"(500000000000, 4, 3), }")), "no .npy file"),
    "more than is there": (text(RIGHT.replace(b"(5, 4, 3), } ", b"(50, 4, 3), }")), "its header says \\(50, 4, 3\\)"),
    "less than is there": (text(RIGHT.replace(b"(5,", b"(4,")), "its header says \\(4, 4, 3\\)"),
    "bytes behind it": (text(RIGHT + b"\0"), "its header says"),
    "cut": (text(RIGHT[:-1]), "its header says"),
    "a length of the header that is not its own": (text(RIGHT[:8] + b"\x10\x00" + RIGHT[10:]), "its header says"),
    "too much": ("A" * (MIB + 4 + bytes_of_routes(SHAPE, TOKENS)), "is not read"),
    "other layers": (
        text(file_of(routes(layers=5).astype(np.uint8))),
        "has 5 layers: TinyMoe has 4, including layers without experts",
    ),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_file_is_refused(kind: str) -> None:
    given, said = HOSTILE[kind]
    with pytest.raises(BadAnswerError, match=said):
        read_npy(given, SHAPE, TOKENS)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([1], "no base64 text"),
        ("%%%", "no base64 text"),
        (
            text(b"\0" * 7),
            "not whole rows of int32 \\[4, 3\\]: its layers or its number of experts are not those of TinyMoe",
        ),
        (text(routes(layers=5).astype("<i4").tobytes()), "not whole rows of int32"),
        ("A" * (MIB + 4 + bytes_of_routes(SHAPE, TOKENS)), "is not read"),
    ],
)
def test_hostile_integers_are_refused(given: Any, said: str) -> None:
    with pytest.raises(BadAnswerError, match=said):
        read_integers(given, SHAPE, TOKENS)


def changed(values: np.ndarray, value: int) -> np.ndarray:
    values = values.astype(np.int32)
    values[2, 1, 0] = value
    return values


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (routes(rows=4), "routed_experts has 4 rows for 6 tokens"),
        (routes(rows=6), "routed_experts has 6 rows for 6 tokens"),
        (np.zeros((10**8, 4, 0)), "routed_experts has 100000000 rows for 6 tokens"),
        (routes(chosen=2), "routed_experts has 2 experts of a token: TinyMoe chooses 3"),
        (changed(routes(), 8), "routed_experts\\[2\\]\\[0\\]\\[0\\] is 8: TinyMoe has 8 experts"),
        (changed(routes(), -1), "routed_experts\\[2\\]\\[0\\]\\[0\\] is -1: TinyMoe has 8 experts"),
        (changed(routes(), 70000), "is 70000"),
        (np.zeros_like(routes()), "names an expert twice"),
        (None, "routed_experts has 0 rows: model.experts.replay: require needs 5"),
    ],
)
def test_an_answer_with_wrong_experts_names_its_server(values: np.ndarray | None, said: str) -> None:
    class Routed(FakeServer):
        async def complete(self, request: Any, n: int) -> list[Completion]:
            given = None if values is None else text(file_of(values.astype(np.int32)))
            found = read_npy(given, self.routes, TOKENS)
            return [Completion([5, 6, 7, 0], [-1.0] * 4, stopped=True, routes=found)]

    server = Routed(url="http://a")
    server.routes = replace(SHAPE, required=True)
    with pytest.raises(BadAnswerError, match=f"^http://a: .*{said}"):
        asyncio.run(complete(server, asked((3, 4)), 1, 1000, 0))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mixture(tmp_path_factory.mktemp("served") / "model", seed=2)


KINDS: dict[str, Callable[[Path, str], FakeSglang]] = {"vllm": FakeVllm, "sglang": FakeSglang}


def run_of(
    kind: str, fake: FakeSglang, tmp_path: Path, replay: str = "require", steps: int = 1, **options: Any
) -> Recorder:
    make_mixture(tmp_path / "model", seed=1)
    sampler = {"protocol": kind, "max_new_tokens": 8, **options}
    with serving(fake) as url:
        config = server_config(
            tmp_path,
            [url],
            model={"experts": {"replay": replay}},
            sampler=sampler,
            schedule={"docs_per_step": 8, "steps": steps},
            optimizer={"learning_rate": 0.01},
        )
        run = Recorder(quiet_trainer(config))
        run.trainer.run()
    return run


def metrics(tmp_path: Path, name: str) -> list[float]:
    return [line[name] for line in read_lines(tmp_path / "run" / "metrics.jsonl")]


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "pause", "staleness"),
    [("vllm", "wait", 0), ("sglang", "wait", 0), ("vllm", "abort", 16), ("sglang", "keep", 16)],
)
def test_a_run_replays_what_its_servers_return(
    kind: str, pause: str, staleness: int, served: Path, tmp_path: Path
) -> None:
    fake = KINDS[kind](served, NAME)
    fake.returns_routes = True
    run = run_of(kind, fake, tmp_path, steps=2, pause=pause, max_staleness=staleness)
    all_but_the_last = [1 - 8 / sum(one.num_tokens for one in documents) for _, documents in run.steps]
    assert metrics(tmp_path, "replayed_tokens") == pytest.approx(all_but_the_last)
    assert all(one.token_fields[ROUTES].shape == (one.num_tokens - 1, 2, 3) for one in run.taken)
    if staleness == 0:
        assert metrics(tmp_path, "route_disagreement") == [0.0, 0.0], "the trainer's own weights routed them"


@pytest.mark.long
def test_experts_of_the_token_before_are_seen(served: Path, tmp_path: Path) -> None:
    fake = FakeVllm(served, NAME)
    fake.returns_routes = True
    fake.spoil = lambda found: np.concatenate([found[:1], found[:-1]])
    with pytest.raises(TrainingError, match="Its log-probs are not the policy's"):
        run_of("vllm", fake, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_returns_none(kind: str, served: Path, tmp_path: Path) -> None:
    with pytest.raises(ServerError, match=r"require: http.* no routed_experts. Start the server with --enable-return"):
        run_of(kind, KINDS[kind](served, NAME), tmp_path)
    run_of(kind, KINDS[kind](served, NAME), tmp_path, replay="auto")
    assert metrics(tmp_path, "replayed_tokens") == [0.0]


@pytest.mark.parametrize("kind", [Vllm, Sglang])
def test_a_stream_that_has_no_experts_comes_at_once(kind: type[HttpServer], served: Path) -> None:
    fake = KINDS[kind.__name__.lower()](served, NAME)
    fake.returns_routes = True
    heard: list[list[int]] = []

    async def main(url: str) -> Completion:
        nothing: Any = lambda *_: None  # noqa: E731
        server = kind(url, NAME, None, 60.0)
        fleet = Fleet([server], vocabulary_size=100, pause="wait", tolerance=1.0, on_void=nothing, on_fatal=nothing)
        fleet.servers[0].version, fleet.servers[0].is_open = 0, True
        server.routes = RouteShape((8, 8), 3, True, numbers=(1, 2), layers=3)
        try:
            return await fleet.generate(asked((3, 4), stops=()), lambda tokens: heard.append(list(tokens)))
        finally:
            await fleet.close()

    with serving(fake) as url:
        completion = asyncio.run(main(url))
    assert [token for tokens in heard for token in tokens] == completion.token_ids and len(heard) == (
        1 if kind is Vllm else 6
    )
    assert completion.routes is not None and completion.routes.shape == (7, 2, 3)


def test_parity_asks_for_experts(served: Path, tmp_path: Path) -> None:
    fake = FakeVllm(served, NAME)
    fake.returns_routes = True
    config = server_config(tmp_path, ["http://127.0.0.1:9"], model={"path": str(served)})
    with serving(fake) as url:
        documents = sample(config, config.sampler.model_copy(update={"urls": [url]}), load_policy(served), 3)
    assert all(one.token_fields[ROUTES].shape == (one.num_tokens - 1, 2, 3) for one in documents)


def test_streams_of_vllm_have_none(served: Path, tmp_path: Path) -> None:
    fake = FakeVllm(served, NAME)
    fake.returns_routes = True
    with pytest.raises(ServerError, match="set sampler.pause to wait or abort"):
        run_of("vllm", fake, tmp_path, pause="keep")


def test_a_server_of_another_model_is_named_at_the_start(served: Path, tmp_path: Path) -> None:
    fake = FakeVllm(served, NAME)
    fake.returns_routes = True
    fake.spoil = lambda found: found[:, 1:]
    with pytest.raises(ServerError, match=r"does not answer as a vLLM server does: routed_experts has 2 layers: Qwen3"):
        run_of("vllm", fake, tmp_path, replay="auto")


@pytest.mark.long
def test_a_server_that_returns_none_later_ends_the_run(served: Path, tmp_path: Path) -> None:
    class Forgets(FakeVllm):
        def _show_routes(self, answer: dict[str, Any], body: dict[str, Any], found: np.ndarray) -> None:
            if len(found) <= 8 and answer["meta_info"]["completion_tokens"] == 1:
                super()._show_routes(answer, body, found)

    fake = Forgets(served, NAME)
    fake.returns_routes = True
    with pytest.raises(SourceError, match="routed_experts has 0 rows: model.experts.replay: require needs"):
        run_of("vllm", fake, tmp_path)


@pytest.mark.long
def test_a_dense_model_asks_for_none(tmp_path: Path) -> None:
    fake = FakeSglang(make_model(tmp_path / "served", seed=2), NAME)
    with serving(fake) as url:
        quiet_trainer(
            server_config(tmp_path, [url], sampler={"protocol": "sglang"}, schedule={"docs_per_step": 4, "steps": 1})
        ).run()
    assert not any("return_routed_experts" in body for path, body in fake.asked if path == "/generate")
