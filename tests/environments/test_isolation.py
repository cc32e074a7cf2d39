"""Isolation that is forced, refused or cannot be had, and what a run says of it."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from small_runs import said, sampled_config, sort_prompts, word_model, write_lines
from truestep.environments import process
from truestep.environments.process import WorkerOptions, isolation_refused
from truestep.environments.prompts import Prompt
from truestep.environments.rater import Rater, check_reward
from truestep.environments.rewards import RewardError

isolated = pytest.mark.skipif(isolation_refused() is not None, reason="rewards cannot be isolated here")
TRY = "import sys; from truestep.environments.process import isolation_refused; print(isolation_refused())"
# Systems that permit no namespaces, or namespaces in which nothing can be mounted, as some containers do.
REFUSALS = {
    "no namespaces": ("echo 0 > /proc/sys/user/max_user_namespaces", "new namespaces: "),
    "a covered /proc": ("mount --bind /dev/null /proc/version", "mount /proc: "),
}


@isolated
@pytest.mark.skipif(shutil.which("unshare") is None, reason="util-linux is not here")
@pytest.mark.parametrize("kind", REFUSALS)
def test_a_system_that_refuses_is_named(kind: str) -> None:
    forbid, reason = REFUSALS[kind]
    command = ["unshare", "-Urm", "sh", "-c", f'{forbid} && exec "$@"', "sh", sys.executable, "-c", TRY]
    tried = subprocess.run(command, capture_output=True, text=True, check=True)
    assert tried.stdout.startswith(reason), tried.stdout


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "isolation_refused", lambda: "not permitted")
    monkeypatch.setattr("truestep.run.assemble.rewards.isolation_refused", lambda: "not permitted")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return word_model(tmp_path_factory.mktemp("isolation") / "model")


def sampled(model: Path, folder: Path, **options: object) -> str:
    prompts = write_lines(folder / "prompts.jsonl", sort_prompts(4))
    return said(sampled_config(model, prompts, folder / "run", schedule={"steps": 1}, sampler=options))


@isolated
def test_a_run_says_that_its_rewards_are_isolated(model: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    text = sampled(model, tmp_path, reward_writable=[str(tmp_path)])
    wanted = f"rewards: isolated: they can read your files, write only to a /tmp in memory and {tmp_path},"
    assert wanted in text.replace("\n", "")


@pytest.mark.usefixtures("refused")
def test_a_run_says_why_its_rewards_are_not_isolated_and_goes_on(model: Path, tmp_path: Path) -> None:
    text = sampled(model, tmp_path)
    assert "rewards: not isolated (not permitted): code that they run can do what you can" in text
    assert "all 1 steps are done" in text


@pytest.mark.usefixtures("refused")
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"reward_isolation": "require"}, "require: rewards cannot be isolated here: not permitted"),
        ({"reward_network": False}, "reward_network: false needs isolation: not permitted"),
    ],
)
def test_what_needs_isolation_is_refused_without(
    options: dict[str, object], reason: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(RewardError, match=reason):
        sampled(model, tmp_path, **options)


def test_a_directory_that_is_not_there_cannot_be_written(model: Path, tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"sampler\.reward_writable: .*missing is not a directory"):
        sampled(model, tmp_path, reward_writable=[str(tmp_path / "missing")])


@isolated
def test_a_directory_that_rewards_have_no_right_to_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    with pytest.raises(RewardError, match=f"could not be isolated: {tmp_path} is not a directory that rewards can"):
        check_reward(WorkerOptions("plain_rewards:one_reward", 60.0, 2**29, writable=(str(tmp_path),)))


@isolated
@pytest.mark.parametrize("network", [True, False])
def test_a_reward_has_a_network_or_none(network: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        rater = Rater(WorkerOptions("server.rewards:connects", 60.0, 2**29, network=network), 1)
        prompt = Prompt("p", "p", {"port": listener.getsockname()[1]}, (1,))
        assert rater.submit(prompt, "any", "0").result(240) == float(network)
        rater.close()


@isolated
def test_what_a_reward_needs_is_there() -> None:
    """Processes and locks of multiprocessing, a temporary directory, programs, and pseudo-terminals."""
    rater = Rater(WorkerOptions("server.rewards:uses_the_machine", 60.0, 2**30), 1)
    assert rater.submit(Prompt("p", "p", {}, (1,)), "any", "0").result(240) == 5.0
    rater.close()
