"""What is wrong with a sampler is said by `parity` as by `train`, in one message."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from small_runs import sampled_config, sort_prompts, word_model, write_lines
from truestep.commands.cli import main
from truestep.config.load import dump_config

pytest.importorskip("httpx")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return word_model(tmp_path_factory.mktemp("samplers") / "model")


def write_config(model: Path, directory: Path, **sampler: object) -> Path:
    prompts = write_lines(directory / "prompts.jsonl", sort_prompts(4))
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    server = {"type": "server", "urls": [url], "model": "m", **sampler}
    config = sampled_config(model, prompts, directory / "run", sampler=server)
    (directory / "c.yaml").write_text(dump_config(config), encoding="utf-8")
    return directory / "c.yaml"


def complaint(*arguments: str) -> str:
    """The one message of a command that fails, in this process."""
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 1 and isinstance(done.exception, SystemExit), done.output
    return done.stderr[done.stderr.index("error:") :]


def complaint_of_another_process(*arguments: str, before: str) -> str:
    code = f"import sys; {before}; from truestep.commands.cli import main; main()"
    command = [sys.executable, "-W", "ignore", "-c", code, *arguments]
    here = Path(__file__).parents[1]  # where the reward's module is: a command searches its working directory
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=here)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr[done.stderr.index("error:") :]


def test_a_missing_key_is_the_same_message(model: Path, tmp_path: Path) -> None:
    config = str(write_config(model, tmp_path, api_key_env="TRUESTEP_TEST_HAS_NO_SUCH_KEY"))
    expected = "sampler.api_key_env: the environment has no variable TRUESTEP_TEST_HAS_NO_SUCH_KEY, or it is empty"
    said = complaint("train", config)
    assert said == f"error: {expected}\n"
    assert complaint("parity", config, "--output", str(tmp_path / "out")) == said


def test_a_server_that_is_down_is_a_message(model: Path, tmp_path: Path) -> None:
    config = write_config(model, tmp_path)
    said = complaint("parity", str(config), "--output", str(tmp_path / "out"))
    assert said.startswith("error: sampler.urls: http://127.0.0.1:")
    assert "gave no completion: /v1/completions: ConnectError" in said
    said = complaint("train", str(config))
    assert said.startswith("error: sampler.urls: http://127.0.0.1:")
    assert "does not answer as a vLLM server does: /health: ConnectError" in said


@pytest.mark.long
def test_without_the_extra_both_say_how_to_install_it(model: Path, tmp_path: Path) -> None:
    config, missing = str(write_config(model, tmp_path)), "sys.modules['httpx'] = None"
    said = complaint_of_another_process("train", config, before=missing)
    assert said == "error: sampler.type: server needs `pip install 'truestep[server]'`\n"
    assert complaint_of_another_process("parity", config, "--output", str(tmp_path / "out"), before=missing) == said
