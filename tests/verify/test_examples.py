"""`verify` raises no alarm on any example, also in bfloat16 and with every optimizer.

test_verify.py has the losses under every layout; here is each example with a stand-in for the model that it names.
"""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path

import pytest

from pages import ROOT
from rollouts.chat_models import make_chat_model
from selection import in_tiers
from small_runs import write_lines
from truestep.config.load import load_config
from truestep.tools.verify.judge import verify
from truestep.tools.verify.report import complaints

EXAMPLES = [
    str(file.relative_to(ROOT / "examples").with_suffix(""))
    for file in sorted((ROOT / "examples").rglob("*.yaml"))
    if file.parent.name != "launch"
]
OPTIMIZERS = {
    "adamw": ["--optimizer.type=adamw", "--optimizer.weight_decay=0.1"],
    "adamw_8bit": ["--optimizer.type=adamw_8bit", "--optimizer.weight_decay=0.1"],
    "muon": ["--optimizer.type=muon", "--optimizer.weight_decay=0.1"],
}
SHARED = {
    *("shared prefixes", "shared prefixes, divided trees", "FSDP 2, shared prefixes"),
    *("context 2, shared prefixes", "tensor 2, shared prefixes", "pipeline 2, shared prefixes"),
}
LAYOUTS = {"one process", "smallest micro-batches", "FSDP 2", *SHARED}
FOR_ANY_MODEL = {"shared prefixes", "shared prefixes, divided trees", "FSDP 2, shared prefixes"}
CASES = [(name, optimizer) for name in EXAMPLES for optimizer in OPTIMIZERS]
IN_LONG = [("sft", "adamw"), ("experts/train", "adamw"), ("boxes/warm-up", "muon"), ("lora-8b", "adamw_8bit")]


def prepare(model: Path, name: str) -> None:
    """Make what the example's own page has a reader make, and a stand-in for a model that nothing makes."""
    folder = name.partition("/")[0]
    if folder in ("boxes", "experts"):
        program = importlib.import_module(
            {"boxes": "examples.boxes.prepare", "experts": "examples.experts.echo"}[folder]
        )
        program.make_model(model)
    else:
        make_chat_model(model, "qwen")
    if name.startswith("boxes"):
        chats = importlib.import_module("examples.boxes.boxes").demonstrations("demonstrations", 100)
        write_lines(Path("runs/boxes/demonstrations.jsonl"), [{"messages": chat} for chat in chats])
    if folder == "recipes":
        Path("runs/recipes").mkdir(parents=True, exist_ok=True)
        importlib.import_module("examples.recipes.prepare").write_demonstrations(Path("runs/recipes"))
        shutil.copyfile(ROOT / "examples/recipes/tools.jinja", model / "chat_template.jinja")
    elif "qwen" in model.name:
        shutil.copyfile(ROOT / "examples/model/config.json", model / "config.json")  # `verify` reads no weights


@pytest.mark.parametrize(("name", "optimizer"), in_tiers(CASES, [], IN_LONG))
def test_no_alarm(name: str, optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT))
    config = load_config(Path(f"examples/{name}.yaml"), ["--model.dtype=bfloat16", *OPTIMIZERS[optimizer]])
    model = Path(config.model.path)
    if not model.exists():
        prepare(model, name)
    wanted = LAYOUTS.__contains__
    verdicts = verify(config, tmp_path / "out", most_ranks=2, documents=8, only=lambda layout: wanted(layout.name))
    found = {verdict.layout.name for verdict in verdicts}
    assert found >= {"one process", "FSDP 2", *FOR_ANY_MODEL} | {"bfloat16: one process", "bfloat16: FSDP 2"}
    assert not [complaint for verdict in verdicts for complaint in complaints(verdict)]
