"""The unmodified client and its recipes, from PyPI (`make tinker`), on `truestep serve`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from checkpoints import read_weights
from generate.endpoint.test_serve import serving
from tinker.house import arrays_of, metrics_of, tenant_of
from tinker.oracle import Adapted, loss_of
from tinker.precision import Error, Exact, of_targets
from tinker.stand_ins import NAME, SMOLLM2, make_chat_model, make_folder, warm_up
from truestep.commands.tinker import wire
from truestep.commands.tinker.checkpoints import Checkpoints
from truestep.commands.tinker.journal import _read

PYTHON = os.environ.get("TRUESTEP_TINKER", "")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not PYTHON, reason="TRUESTEP_TINKER names no Python: `make tinker` makes one"),
]
VERIFIERS = os.environ.get("TRUESTEP_TINKER_VERIFIERS", "")
KEY = "tml-nightly"
IDS, NEXT = [3, 4, 5, 6, 7], [4, 5, 6, 7, 8]
RL: dict[str, Any] = {"logprobs": [-4, -5, -4.5, -4, -3.5], "advantages": [0, 1, -1, 0.5, 2]}
LOSSES: dict[str, tuple[dict[str, Any], dict[str, float]]] = {
    "cross_entropy": ({"weights": [0, 1, 1, 0.5, 1]}, {}),
    "importance_sampling": (RL, {}),
    "ppo": (RL, {"clip_low_threshold": 0.5, "clip_high_threshold": 1.1}),
    "cispo": (RL, {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
    "dro": (RL, {"beta": 0.1}),
    "gspo": ({**RL, "sequence_ratio_mask": [0, 1, 1, 1, 1]}, {"clip_low_threshold": 0.7, "clip_high_threshold": 1.3}),
}
NUMBERS = {"ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}}
ADAM = {"learning_rate": 0.05, "beta1": 0.8, "beta2": 0.9, "eps": 0.5, "weight_decay": 0.1, "grad_clip_norm": 2.0}
RECIPES = "tinker_cookbook.recipes"
QWEN = "renderer_name=qwen3_disable_thinking"
GSM8K = f"dataset_builder={RECIPES}.math_rl.math_env:Gsm8kDatasetBuilder"
# What a recipe's command line says beside the model and the directory; the metric that shows what is learnt, and by how
# much it has to change from the first two steps that have it to the last two.
RUNS: dict[str, tuple[str, str, float]] = {
    "sl_loop": ("batch_size=16 max_length=256 learning_rate=0.01 max_steps=12", "train_mean_nll", -1.0),
    "sl_basic": ("num_epochs=5 learning_rate=0.01 max_steps=10", "train_mean_nll", -1.0),
    "rl_loop": (
        "batch_size=8 group_size=16 max_tokens=24 max_steps=12 learning_rate=0.006 loss_fn=importance_sampling",
        "reward/total",
        0.08,
    ),
    "rl_basic": (
        f"max_steps=12 max_tokens=24 learning_rate=0.006 {GSM8K} dataset_builder.batch_size=8 "
        "dataset_builder.group_size=16 dataset_builder.renderer_name=qwen3 "
        f"dataset_builder.model_name_for_tokenizer={NAME}",
        "env/all/correct",
        0.08,
    ),
    "math_rl.train": (
        "env=arithmetic groups_per_batch=8 group_size=8 max_steps=8 loss_fn=ppo learning_rate=0.01",
        "env/all/reward/total",
        0.01,
    ),
    "preference.shorter.train": (
        f"batch_size=4 group_size=8 max_tokens=24 max_steps=8 learning_rate=0.01 {QWEN}",
        "env/all/ac_tokens_per_turn",
        -1.0,
    ),
    "preference.dpo.train": ("batch_size=8 max_length=256 max_steps=8 learning_rate=0.01", "dpo_loss", -0.1),
    "distillation.on_policy_distillation": (
        f"teacher_model={NAME} groups_per_batch=16 max_tokens=8 max_steps=12 learning_rate=0.006",
        "teacher_kl",
        -0.2,
    ),
    "multiplayer_rl.guess_number.train": (
        f"batch_size=4 group_size=8 max_tokens=24 max_steps=12 learning_rate=0.003 eval_every=0 {QWEN}",
        "env/all/reward/total",
        2.0,
    ),
}


# The same on SmolLM2, with smaller sizes.
SMALL_TEACHER = "batch_size=16 max_length=256 learning_rate=0.002 max_steps=12"
BUILDER = "dataset_builder=tinker_cookbook.recipes.chat_sl.chat_datasets:NoRobotsBuilder"
SMALL_RUNS: dict[str, tuple[str, str, float | None]] = {
    "sl_loop": ("batch_size=8 max_length=256 learning_rate=0.0005 max_steps=6", "train_mean_nll", -1.0),
    "sl_basic": (
        f"learning_rate=0.0005 max_steps=5 {BUILDER} dataset_builder.common_config.model_name_for_tokenizer={NAME} "
        "dataset_builder.common_config.renderer_name=qwen3 dataset_builder.common_config.max_length=256 "
        "dataset_builder.common_config.batch_size=8",
        "train_mean_nll",
        -1.0,
    ),
    "rl_loop": (
        "batch_size=4 group_size=8 max_tokens=16 max_steps=10 learning_rate=0.0003 loss_fn=importance_sampling",
        "reward/total",
        0.08,
    ),
    "rl_basic": (
        f"max_steps=10 max_tokens=16 learning_rate=0.0003 {GSM8K} dataset_builder.batch_size=4 "
        "dataset_builder.group_size=8 dataset_builder.renderer_name=qwen3 "
        f"dataset_builder.model_name_for_tokenizer={NAME}",
        "env/all/correct",
        0.08,
    ),
    "math_rl.train": (
        "env=arithmetic groups_per_batch=4 group_size=8 max_steps=6 loss_fn=ppo learning_rate=0.0005",
        "env/all/reward/total",
        0.01,
    ),
    "preference.shorter.train": (
        f"batch_size=2 group_size=8 max_tokens=32 max_steps=6 learning_rate=0.001 {QWEN}",
        "env/all/ac_tokens_per_turn",
        -2.0,
    ),
    "preference.dpo.train": ("batch_size=4 max_length=256 max_steps=4 learning_rate=0.0003", "dpo_loss", -0.2),
    "distillation.on_policy_distillation": (
        f"teacher_model={NAME} groups_per_batch=8 group_size=4 max_tokens=8 max_steps=10 learning_rate=0.0005",
        "teacher_kl",
        -0.2,
    ),
    "multiplayer_rl.guess_number.train": (
        f"batch_size=1 group_size=4 max_tokens=8 max_steps=1 learning_rate=0.0005 eval_every=0 {QWEN}",
        "env/all/reward/total",
        None,  # one answer of thirty has the form that is asked for, so it would learn in hours at best
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_folder(tmp_path_factory.mktemp("cookbook"))
    make_chat_model(folder / NAME)
    return folder


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    with served(folder) as url:
        yield url


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model that answers."""
    folder = make_folder(tmp_path_factory.mktemp("warm"))
    make_chat_model(folder / NAME, norm=1.0)
    warm_up(folder / NAME)
    return folder


@pytest.fixture(scope="module")
def warm_address(warm: Path) -> Iterator[str]:
    with served(warm) as url:
        yield url


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with SmolLM2."""
    folder = make_folder(tmp_path_factory.mktemp("smollm2"), examples=True)
    sections = json.loads((folder / "serve.yaml").read_text())
    sections["data"]["share_prefixes"] = "always"  # a prompt is most of a datum
    (folder / "serve.yaml").write_text(json.dumps(sections))
    (folder / NAME).parent.mkdir(parents=True)
    (folder / NAME).symlink_to(SMOLLM2)
    return folder


@pytest.fixture(scope="module")
def small_address(small: Path) -> Iterator[str]:
    with served(small) as url:
        yield url


@contextmanager
def served(folder: Path) -> Iterator[str]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        options = ("--tinker", str(folder / "checkpoints"), "--tinker-name", NAME)
        with serving(folder / "serve.yaml", *options) as url:
            yield url.removesuffix("/v1")
    finally:
        os.chdir(before)


def has_smollm2(folder: Path) -> bool:
    return (folder / NAME).is_symlink()


def run(folder: Path, address: str, *command: str, python: str = PYTHON) -> str:
    """Run a program with the client's packages, in the folder."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TINKER_API_KEY": KEY, "TINKER_BASE_URL": address}
    # Without a cache of its own the library gives the rows that lay under this name when it read them first.
    offline |= {"HF_DATASETS_CACHE": str(folder / "cache")}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | offline
    done = subprocess.run(
        [python, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1500 if has_smollm2(folder) else 500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout


@pytest.fixture(scope="module")
def seen(folder: Path, address: str) -> dict[str, Any]:
    """What the program of a user saw."""
    program = shutil.copy(Path(__file__).with_name("client_program.py"), folder / "program.py")
    found: dict[str, Any] = json.loads(run(folder, address, str(program), NAME).splitlines()[-1])
    return found


def matrices(folder: Path, path: str) -> dict[str, torch.Tensor]:
    found = read_weights(Checkpoints(folder / "checkpoints").find(tenant_of(KEY), path)[1])
    return {name: one for name, one in found.items() if ".lora_" in name}


def test_losses_and_updates_are_the_oracle_s(folder: Path, seen: dict[str, Any]) -> None:
    """From the first weights on: each loss, its gradient through AdamW, and a loss of the client's own."""
    oracle = Adapted(folder / NAME, matrices(folder, seen["begin"]))
    for name, (given, numbers) in LOSSES.items():
        own = oracle.logprobs(IDS, NEXT)
        total = loss_of(name, own, given, **numbers)
        logprobs, loss, norm = seen["losses"][name]
        np.testing.assert_allclose(logprobs, [float(one.detach()) for one in own], rtol=0, atol=1e-5)
        assert loss == pytest.approx(float(total.detach()), rel=1e-5, abs=1e-5), name
        assert norm == pytest.approx(oracle.update(total, ADAM), rel=1e-5), name
    total = torch.stack(oracle.logprobs(IDS, NEXT)).square().sum()
    squares, loss, norm = seen["custom"]
    assert squares == pytest.approx(float(total.detach()), rel=1e-5) == loss
    assert norm == pytest.approx(oracle.update(total, ADAM), rel=1e-5)
    for name, values in matrices(folder, seen["end"]).items():
        expected = oracle.matrices[name].detach()
        assert float((values - expected).norm()) <= 1e-5 * max(1.0, float(expected.norm())), name


def test_samples_and_log_probs_are_the_oracle_s(folder: Path, seen: dict[str, Any]) -> None:
    end = Adapted(folder / NAME, matrices(folder, seen["end"]))
    found = [float(one.detach()) for one in end.logprobs([3, 4], [4, 5])]
    assert seen["prompt"][0] is None
    np.testing.assert_allclose(seen["prompt"][1:], found, rtol=0, atol=1e-5)
    for tokens, logprobs, stop, top in seen["samples"]:
        rows = end._model.logits([3, 4, 5, *tokens], temperature=0.7)[2:-1].log_softmax(-1)
        own = [float(row[token].detach()) for row, token in zip(rows, tokens, strict=True)]
        np.testing.assert_allclose(logprobs, own, rtol=0, atol=1e-5)
        assert stop in ("stop", "length") and [len(each) for each in top] == [2] * len(tokens)


def test_checkpoints_and_refusals(seen: dict[str, Any]) -> None:
    assert set(seen["listed"]) == {seen["end"], seen["begin"], seen["removed"]}
    assert set(seen["left"]) == {seen["end"], seen["begin"]}
    assert seen["same"][0] == seen["same"][1] == seen["after"] and seen["capabilities"] == NAME
    assert "outside of the vocabulary" in seen["refused cross_entropy"]
    assert "its formula is not public" in seen["refused stable_reinforce"]


@contextmanager
def first_passes(folder: Path) -> Iterator[Path]:
    """Keep what the server's journal says of each model that is made meanwhile: links to its files, which the end of a
    session does not remove."""
    links, stopped = Path(tempfile.mkdtemp(dir=folder)), threading.Event()

    def look() -> None:
        while not stopped.wait(0.1):
            for file in (folder / "checkpoints" / "live").glob("*/*/0/requests"):
                link = links / f"{file.parent.parent.parent.name}-{file.parent.parent.name}"
                with suppress(FileExistsError, FileNotFoundError):
                    os.link(file, link)

    before = {file.parent.parent.parent.name for file in (folder / "checkpoints" / "live").glob("*/*/*/requests")}
    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield links
    finally:
        stopped.set()
        looking.join()
        for link in links.iterdir():
            if link.name.rpartition("-")[0] in before:
                link.unlink()


def check_first_pass(folder: Path, links: Path, float32_angles: bool = False, cancels: bool = False) -> None:
    """The log-probs and the loss of a recipe's first pass are those of the base model in float64 to 1e-5, since the
    first adapter adds nothing. A single log-prob of SmolLM2 may be off by twice what transformers' own in float32 are:
    float32 logits of 40 have no more places. `cancels`: the loss's terms of both signs nearly cancel, as advantages do;
    its error is measured by the sum of their sizes."""
    directory, passes = (folder / NAME).resolve(), list(read_first_passes(links))
    exact, loader, single = Exact(directory, float32_angles), cast(Any, AutoModelForCausalLM), None
    if has_smollm2(folder):
        single = loader.from_pretrained(directory, dtype=torch.float32).eval()
    assert passes
    for request, told in passes:
        total, size, served, theirs = 0.0, 0.0, Error(), Error()
        for datum, found in zip(request.data, arrays_of(told), strict=True):
            own = exact.logprobs(datum)
            served.add(found["logprobs"], own)
            if single is not None:
                with torch.no_grad():
                    theirs.add(of_targets(single(torch.from_numpy(datum.tokens.copy())[None]).logits[0], datum), own)
            if request.loss == "cross_entropy":
                total -= float((own * datum.inputs.get("weights", np.ones(own.shape))).sum())
            else:
                given = {name: values.tolist() for name, values in datum.inputs.items()}
                size += sum(map(abs, given["advantages"]))
                numbers = NUMBERS.get(request.loss, {}) | {name: float(one) for name, one in request.config.items()}
                total += float(loss_of(request.loss, list(torch.from_numpy(own)), given, **numbers))
        loss = metrics_of(told)["loss:sum"]
        print(f"loss {loss:.6g}, off by {abs(loss - total):.1e}, its terms {size:.1f}; log-probs off by {served}")
        if single is not None:
            print(f"transformers in float32 off by {theirs}")
        assert loss == pytest.approx(total, rel=1e-5, abs=1e-5 * (size if cancels else 1.0))
        assert served.norm <= 1e-5, served
        assert served.most_relative <= max(1e-5, 0.0 if single is None else 2 * theirs.most_relative), (served, theirs)


def read_first_passes(links: Path) -> Iterator[tuple[Any, bytes]]:
    """The first pass of each model, and what was told of it."""
    for link in links.iterdir():
        records = list(_read(link))
        passes = [one for one in records if one.is_request and one.head["path"] == "forward_backward"]
        if passes:
            told = next(one.body for one in records if not one.is_request and one.seq == passes[0].seq)
            request = wire.read_forward_backward(passes[0].body)
            assert request.data
            yield request, told


@pytest.mark.parametrize("recipe", RUNS)
def test_recipes_of_the_cookbook_run_unmodified(recipe: str, warm: Path, warm_address: str) -> None:
    options, metric, change = RUNS[recipe]
    given = options.split()
    if "teacher" in options:
        given.append(f"teacher_checkpoint={taught(warm, warm_address, RUNS['sl_loop'][0])}")
    # Conversations of 1,300 tokens: float64's own rotary angles alone move a log-prob by 7e-5 there.
    check_recipe(recipe, given, metric, change, warm, warm_address, float32_angles="guess_number" in recipe)


@pytest.mark.release
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not SMOLLM2.is_dir(), reason="`make small-model` gets SmolLM2")
@pytest.mark.parametrize("recipe", SMALL_RUNS)
def test_recipes_train_smollm2(recipe: str, small: Path, small_address: str) -> None:
    options, metric, change = SMALL_RUNS[recipe]
    given = options.split()
    if "teacher" in options:
        given.append(f"teacher_checkpoint={taught(small, small_address, SMALL_TEACHER)}")
    check_recipe(recipe, given, metric, change, small, small_address)


def check_recipe(
    recipe: str,
    options: list[str],
    metric: str,
    change: float | None,
    folder: Path,
    address: str,
    float32_angles: bool = False,
) -> None:
    """Run it; compare its first pass; see that the metric changes so much (None: it learns nothing)."""
    log = folder / "logs" / recipe
    with first_passes(folder) as seen:
        run(folder, address, "-m", f"{RECIPES}.{recipe}", f"model_name={NAME}", f"log_path={log}", *options)
    lines = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    assert (log / "checkpoints.jsonl").read_text()
    found = [line[metric] for line in lines if metric in line]
    learnt = (sum(found[-2:]) - sum(found[:2])) / 2
    print(recipe, metric, found)
    check_first_pass(folder, seen, float32_angles)
    if change is not None:
        assert learnt >= change if change > 0 else learnt <= change, found


def taught(folder: Path, address: str, options: str) -> str:
    """A teacher: what sl_loop makes of the model."""
    log = folder / "logs" / "teacher"
    given = ["model_name=" + NAME, f"log_path={log}", *options.split()]
    run(folder, address, "-m", f"{RECIPES}.sl_loop", *given)
    return str(json.loads((log / "checkpoints.jsonl").read_text().splitlines()[-1])["sampler_path"])


@pytest.mark.skipif(not VERIFIERS, reason="TRUESTEP_TINKER_VERIFIERS names no Python: `make tinker` makes one")
def test_the_recipe_of_verifiers_runs_but_for_one_argument(folder: Path, address: str) -> None:
    sizes = "group_size=8 groups_per_batch=8 max_tokens=6 max_steps=6 learning_rate=0.003 lora_rank=8"
    check_recipe_of_verifiers(folder, address, sizes, 0.4)


@pytest.mark.release
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not VERIFIERS, reason="TRUESTEP_TINKER_VERIFIERS names no Python: `make tinker` makes one")
@pytest.mark.skipif(not SMOLLM2.is_dir(), reason="`make small-model` gets SmolLM2")
def test_the_recipe_of_verifiers_trains_smollm2(small: Path, small_address: str) -> None:
    sizes = "group_size=8 groups_per_batch=4 max_tokens=6 max_steps=6 learning_rate=0.0005 lora_rank=8"
    check_recipe_of_verifiers(small, small_address, sizes, 0.05)


def check_recipe_of_verifiers(folder: Path, address: str, sizes: str, change: float) -> None:
    log = folder / "logs" / "verifiers"
    given = [f"model_name={NAME}", f"log_path={log}", "renderer_name=qwen3_disable_thinking", "vf_env_id=late_letters"]
    program = shutil.copy(Path(__file__).with_name("verifiers_program.py"), folder / "verifiers_program.py")
    with first_passes(folder) as seen:
        run(folder, address, str(program), *given, *sizes.split(), python=VERIFIERS)
    lines = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "optim/kl_sample_train_v1" in line]
    assert len(steps) == 6
    assert all(abs(line["optim/kl_sample_train_v1"]) < 1e-5 for line in steps), "trained as they were sampled"
    rewards = [line["env/all/reward/total"] for line in steps]
    print("verifiers_rl", rewards)
    check_first_pass(folder, seen, cancels=has_smollm2(folder))
    assert sum(rewards[-2:]) / 2 > rewards[0] + change, rewards
