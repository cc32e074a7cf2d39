"""`truestep serve`: the policy without training, whose documents are records that it scores as it drew them."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

from small_runs import read_lines, type_command, word_model
from truestep import score
from truestep.config.load import load_config
from truestep.tools.serve import ServeError, serve


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("serve")
    model = {"path": str(word_model(folder / "model")), "dtype": "float32", "device": "cpu"}
    sections = {
        "model": model,
        "data": {"path": str(folder / "documents.jsonl"), "tokens_per_microbatch": 64},
        "loss": {"type": "grpo"},
        "schedule": {"docs_per_step": 4, "steps": 1},
    }
    (folder / "serve.yaml").write_text(yaml.safe_dump(sections))
    return folder / "serve.yaml"


@contextmanager
def serving(config: Path, *options: str, **environment: str) -> Iterator[str]:
    console = config.with_name(f"console-{time.monotonic_ns()}")
    console.touch()
    process = type_command(["serve", str(config), "--port", "0", *options], console, **environment)
    try:
        while " is served at " not in (text := console.read_text()):
            assert process.exitcode is None, text
            time.sleep(0.05)
        yield text.split(" is served at ")[1].split(";")[0]
    finally:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGINT)
        process.join(60)


def ask(url: str, key: str, prompt: str = "sort 3 1 =", **options: Any) -> list[str]:
    client = openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=60)
    given: Any = {"temperature": 1.0, "max_tokens": 6, **options}
    return [choice.text for choice in client.completions.create(model="policy", prompt=prompt, **given).choices]


def post(url: str, key: str, reward: float) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    body = {"reward": reward, "group_id": "all"}
    return httpx.post(f"{url}/documents/{key}/reward", json=body, headers=headers, timeout=60)


# A page of the web can have a name of its own lead to this machine, and then ask as a program here does.
HOSTS = {
    "localhost:8000": 200,
    "127.0.0.1": 200,
    "[::1]:80": 200,
    "evil.example:8000": 403,
    "localhost.evil.example": 403,
    "127.0.0.1.evil.example:80": 403,
    "evil.example@localhost@": 403,
    "[::1": 403,
    "": 403,
}


def test_documents_with_rewards_are_records_that_the_policy_scores_alike(config: Path, tmp_path: Path) -> None:
    file = config.with_name("documents.jsonl")
    with serving(config, "--documents", str(file)) as url:
        for number in range(3):
            (first,) = ask(url, f"d{number}")
            ask(url, f"d{number}", f"sort 3 1 ={first} sort 2 1 =")
            ask(url, f"d{number}", "sort 5 =", n=2)
            assert post(url, f"d{number}", float(number)).status_code == 200
        assert ask(url, "warm", temperature=0.0) == ask(url, "warm", temperature=0.0)
        refused = post(url, "warm", 1.0)
        assert refused.status_code == 400 and "temperatures 0: a document has one, above 0" in refused.text
        assert post(url, "empty", 1.0).status_code == 400
        ask(url, "d0", temperature=0.5)
        assert post(url, "d0", 1.0).status_code == 200, "the name begins another document"
        for host, status in HOSTS.items():
            headers = {"Authorization": "Bearer any", "Host": host}
            assert httpx.get(f"{url}/models", headers=headers, timeout=60).status_code == status, host
    records = read_lines(file)
    assert [record["reward"] for record in records if record["id"].endswith(".0")] == [0.0, 1.0, 2.0]
    assert [record["sequences"] for record in records[:9]] == [3] * 9 and records[9]["temperature"] == 0.5
    file.write_text("".join(json.dumps(record) + "\n" for record in records[:9]))
    found = score(load_config(config), tmp_path / "score")
    assert found.step["num_documents"] == 3
    assert found.step["ratio_new_old"] == pytest.approx(1, abs=1e-6)
    assert found.step["num_sequences"] == 9


def test_a_secret_begins_every_key(config: Path) -> None:
    with serving(config, "--key-env", "SERVE_SECRET", SERVE_SECRET="open sesame") as url:
        assert ask(url, "open sesame") and ask(url, "open sesame:doc 1")
        for wrong in ("doc 1", "open sesam", "open sesame2", "open", "x" * 5000):
            with pytest.raises(openai.AuthenticationError):
                ask(url, wrong)
        refused = post(url, "open sesame", 1.0)
        assert refused.status_code == 400 and "--documents FILE" in refused.text


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.7", "example.org"])
def test_others_reach_it_with_a_secret_alone(host: str, config: Path) -> None:
    with pytest.raises(ServeError, match="may be reached by others: give --key-env"):
        serve(load_config(config), host=host)
