"""What others fell into, against the real server: the unguarded way is wrong there, and ours holds or reports it."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from server.conftest import Servers
from server.models import LIKELIEST, make_model
from server.proxy import Answer, Proxy
from server.runs import label_versions, recorded, score, server_config
from server.vllm_server import NAME, VllmServer
from small_runs import tokenised_model
from truestep.generate.errors import ServerError
from truestep.generate.servers import weight_files as sync
from truestep.generate.servers.probe import expect, measure
from truestep.generate.servers.vllm import Vllm
from truestep.head.logits import HeadSettings
from truestep.model.loading.load import load_policy
from truestep.model.policy import Policy
from truestep.model.save import save_policy
from truestep.types import Rollout

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]  # the first test waits for the servers to start

LONG, SHORT = tuple(2 + number * 7 % 11 for number in range(400)), (2, 3, 4, 5)


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return load_policy(make_model(tmp_path_factory.mktemp("old") / "model", seed=21), head=HeadSettings(fp32=True))


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return load_policy(make_model(tmp_path_factory.mktemp("new") / "model", seed=22), head=HeadSettings(fp32=True))


@pytest.fixture(scope="module")
def weights(old: Policy, new: Policy, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = sync.WeightsDirectory(tmp_path_factory.mktemp("weights"))
    return {"old": directory.write(old, 0, torch.float32), "new": directory.write(new, 1, torch.float32)}


def reload_weights(server: VllmServer, path: Path) -> None:
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
    assert server.post("/collective_rpc", body).status_code == 200


def gap(url: str, policy: Policy, *prompts: tuple[int, ...]) -> float:
    """How far a server's next tokens are from the policy's, in nats."""

    async def ask() -> float:
        server = Vllm(url, NAME, None, 60)
        try:
            return (await measure(server, expect(policy, prompts, 0))).expected
        finally:
            await server.close()

    return asyncio.run(ask())


def sample(server: VllmServer, prompt: Sequence[int], tokens: int, **options: Any) -> Rollout:
    """One completion by a plain request, as anybody would write it."""
    body = {"model": NAME, "prompt": list(prompt), "max_tokens": tokens, "logprobs": 0, "return_token_ids": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body | {"ignore_eos": True} | options, timeout=120).json()
    (choice,) = answer["choices"]
    ids = np.array([*prompt, *choice["token_ids"]], dtype=np.int64)
    mask = np.arange(len(ids)) >= len(prompt)
    logprobs = np.zeros(len(ids), dtype=np.float32)
    logprobs[mask] = choice["logprobs"]["token_logprobs"]
    return Rollout("a", ids, mask, logprobs, temperature=options.get("temperature", 1.0))


def gaps(policy: Policy, rollout: Rollout) -> np.ndarray:
    assert rollout.logprobs is not None
    (logprobs,) = score(policy, [rollout])
    return np.abs(logprobs - rollout.logprobs[rollout.loss_mask])


# ---- a cache of what the old weights computed


def test_without_a_reset_the_cache_of_the_old_weights_answers_for_the_new(
    servers: Servers, old: Policy, new: Policy, weights: dict[str, Path]
) -> None:
    servers.first.give(weights["old"])
    assert gap(servers.first.url, old, LONG, SHORT) < 1e-3
    servers.first.post("/pause?mode=wait&clear_cache=false")
    reload_weights(servers.first, weights["new"])
    servers.first.post("/resume")
    assert gap(servers.first.url, new, SHORT) < 1e-3, "a short prompt hides it"
    assert gap(servers.first.url, new, LONG) > 0.1
    servers.first.give(weights["new"])
    assert gap(servers.first.url, new, LONG, SHORT) < 1e-3


@pytest.fixture
def keeps_its_cache(servers: Servers) -> Iterator[Proxy]:
    """In front of a server that says it has emptied its cache, and has not."""

    async def spoil(path: str, asked: Any, answer: Answer) -> Answer:
        return answer

    with Proxy(servers.first.url, spoil) as proxy:
        send = proxy._http.request

        async def lying(method: str, target: str, **rest: Any) -> httpx.Response:
            if target.startswith("/reset_prefix_cache"):
                return httpx.Response(200, json={"success": True})
            if target.startswith("/pause"):
                target += "&clear_cache=false"
            return await send(method, target, **rest)

        proxy._http.request = lying  # type: ignore[method-assign]
        yield proxy


def test_a_cache_that_outlives_its_weights_ends_the_run_before_anything_is_trained_on(
    keeps_its_cache: Proxy, tmp_path: Path
) -> None:
    config = server_config(tmp_path, [keeps_its_cache.url], optimizer={"learning_rate": 3e-3})
    run = recorded(config)
    with pytest.raises(
        ServerError, match=r"version \d+, and scores a probe of 300 tokens .*its prefix cache is still of"
    ):
        run.trainer.run()
    assert run.trainer.step <= 1


# ---- log-probs before the temperature


def test_raw_logprobs_ignore_the_temperature_and_are_named(servers: Servers, tmp_path: Path) -> None:
    started_with = load_policy(servers.model, head=HeadSettings(fp32=True))
    servers.raw.give(sync.WeightsDirectory(tmp_path / "weights").write(started_with, 0, torch.float32))
    rollout = sample(servers.raw, SHORT, 8, temperature=0.7, top_k=0)
    assert gaps(started_with, rollout).max() > 0.05, "the unguarded way"
    (tmp_path / "model").symlink_to(servers.model)
    with pytest.raises(ServerError, match="gives raw_logprobs: .* Start the server with --logprobs-mode processed_lo"):
        recorded(server_config(tmp_path, [servers.raw.url])).trainer.run()


def _saved(policy: Policy, directory: Path) -> Path:
    save_policy(policy, directory)
    return directory


# ---- weights that change under a completion


def sample_across_a_reload(server: VllmServer, path: Path) -> Rollout:
    """A long completion, and new weights without a pause as soon as it has some tokens."""
    prompt, tokens, logprobs = LONG[:200], list[int](), list[float]()
    body = {"model": NAME, "prompt": list(prompt), "max_tokens": 800, "logprobs": 0, "return_token_ids": True}
    plain = {"ignore_eos": True, "temperature": 1.0, "top_k": 0, "stream": True}
    reload = threading.Thread(target=reload_weights, args=(server, path))
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body | plain, timeout=120) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                tokens += choice["token_ids"] or []
                logprobs += (choice["logprobs"] or {}).get("token_logprobs") or []
            if len(tokens) >= 8 and reload.ident is None:
                reload.start()
    reload.join()
    ids = np.array([*prompt, *tokens], dtype=np.int64)
    given = np.array([*[0.0] * len(prompt), *logprobs], dtype=np.float32)
    return Rollout("a", ids, np.arange(len(ids)) >= len(prompt), given, temperature=1.0)


def test_a_reload_without_a_pause_gives_text_of_neither_model(
    servers: Servers, old: Policy, new: Policy, weights: dict[str, Path]
) -> None:
    servers.first.give(weights["old"])
    rollout = sample_across_a_reload(servers.first, weights["new"])
    nearer = np.minimum(gaps(old, rollout), gaps(new, rollout))
    assert gaps(old, rollout)[:5].max() < 1e-3, "it began with the old weights"
    assert nearer.max() > 0.05, "and went on with the new ones over what the old ones had cached"


def test_kept_completions_are_of_two_policies_and_say_where(servers: Servers, tmp_path: Path) -> None:
    """Every token is scored by the version that it names; one version for the whole would be wrong by far."""
    make_model(tmp_path / "model", seed=1, talkative=True)
    config = server_config(
        tmp_path,
        [servers.first.url],
        sampler={"pause": "keep", "max_staleness": 16, "max_new_tokens": 900, "temperature": 1.0},
        schedule={"docs_per_step": 8, "steps": 4},
        optimizer={"learning_rate": 1e-2},
    )
    run = recorded(config)
    run.trainer.check = None  # weights move twice after a step here: the policy is no longer what its version names
    policy = run.trainer.policy
    talking, updated = run.shared._servers, run.shared.updated
    (server,) = talking.ahead.fleet.servers
    stream, came = server.remote.stream, [0]

    def counted(asked: Any, n: int, arrived: Callable[[int, Sequence[int]], None]) -> Any:
        def count(index: int, tokens: Sequence[int]) -> None:
            came[0] += len(tokens)
            arrived(index, tokens)

        return stream(asked, n, count)

    server.remote.stream = counted

    def with_completions_under_way(step: int, seen: int) -> None:
        """Each time, other weights still as soon as completions have many tokens of the last ones."""
        updated(step, seen)
        if seen < 32:
            talking._sending.result(60)
            before, deadline = came[0], time.monotonic() + 60
            while came[0] < before + 600 and time.monotonic() < deadline:
                time.sleep(0.01)
            with torch.no_grad():
                for parameter in policy.model.parameters():
                    if len(parameter) == policy.vocabulary_size:  # other words for all but the end
                        parameter[1:] = parameter[1:].roll(1, 0)
            run.shared.publish(seen + 4)

    run.shared.updated = with_completions_under_way
    run.trainer.run()
    assert run.worst_gap() < 1e-4
    of_two = [rollout for rollout in run.taken if len(set(label_versions(rollout).tolist())) > 1]
    assert of_two
    worst = 0.0
    for rollout in of_two:
        versions = label_versions(rollout)
        assert (np.diff(versions) >= 0).all()
        policy.model.load_state_dict(run.weights[int(versions[0])])
        worst = max(worst, float(gaps(policy, rollout)[versions > versions[0]].max()))
    assert worst > 0.05, "the unguarded way"


# ---- what a server says of its weights


def test_the_checksum_does_not_follow_the_weights(
    servers: Servers, old: Policy, new: Policy, weights: dict[str, Path]
) -> None:
    def checksums() -> dict[str, str]:
        answer = servers.first.post("/weight_checker", {"action": "checksum"})
        return answer.json()["checksums"] if answer.status_code == 200 else {}

    servers.first.give(weights["old"])
    before, near = checksums(), gap(servers.first.url, old, LONG)
    servers.first.give(weights["new"])
    changed = {name for name, digest in checksums().items() if before.get(name) != digest}
    layers = {name for name in before if "proj" in name}
    assert not layers & changed, "packed for the CPU, the layers' weights are where no checksum looks"
    assert near < 1e-3 and gap(servers.first.url, old, LONG) > 0.1 and gap(servers.first.url, new, LONG) < 1e-3


def test_a_tied_head_needs_an_entry_of_its_own(
    servers: Servers, new: Policy, weights: dict[str, Path], tmp_path: Path
) -> None:
    """The engine for CPUs goes on with the head that it was started with."""
    servers.first.give(weights["old"])
    servers.first.give(_saved(new, tmp_path / "plain"))
    assert gap(servers.first.url, new, SHORT) > 0.1, "the unguarded way"
    servers.first.give(weights["new"])
    assert gap(servers.first.url, new, SHORT) < 1e-3


# ---- what a server does of its own accord


def test_the_models_own_sampling_defaults_stay_out(servers: Servers, old: Policy, weights: dict[str, Path]) -> None:
    """generation_config.json says top_k: 3, and a plain request is cut to 3 tokens, whose log-probs say so."""
    servers.first.give(weights["old"])
    plain = sample(servers.first, SHORT, 32, temperature=1.0)
    assert gaps(old, plain).max() > 0.05, "the unguarded way"
    assert json.loads((weights["old"] / "generation_config.json").read_text()).get("top_k") is None
    assert LIKELIEST == 3
    # Ours is scored token by token in every other test of this file.


def test_a_server_that_would_cut_completions_short_is_refused_at_the_start(servers: Servers, tmp_path: Path) -> None:
    """It takes the request, makes fewer tokens than asked for, and calls the reason length."""
    cut = sample(servers.first, LONG[:200] * 5, 100, top_k=0, temperature=1.0)
    assert cut.num_labels == 24, "the unguarded way"
    config = server_config(tmp_path, [servers.first.url], sampler={"max_new_tokens": 1000})
    with pytest.raises(ServerError, match=r"serves at most 1024 tokens; .* start it with --max-model-len 10\d\d"):
        recorded(config)


def test_another_model_is_refused_at_the_start(servers: Servers, tmp_path: Path) -> None:
    tokenised_model(tmp_path / "model", "llama")
    with pytest.raises(ServerError, match="does not know token 60 of the trainer's vocabulary of 61"):
        recorded(server_config(tmp_path, [servers.first.url]))


def test_another_name_is_refused_at_the_start(servers: Servers, tmp_path: Path) -> None:
    config = server_config(tmp_path, [servers.first.url], sampler={"model": "qwen"})
    with pytest.raises(ServerError, match=f"serves {NAME}, not qwen"):
        recorded(config)
