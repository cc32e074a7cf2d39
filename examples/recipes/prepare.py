"""Prepares the recipes: demonstrations for warm-ups, and the model with a chat template that shows tools.

    python -m examples.recipes.prepare [--model models/smollm2] [--output runs/recipes]

OUTPUT/model has the model's own files, by links, and the template tools.jinja. OUTPUT/NAME.jsonl has the conversations.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from examples.recipes import calculator, retrieval, structured

from truestep.environments.episodes.environment import tools_of

TEMPLATE = Path(__file__).with_name("tools.jinja")
COUNT = 96  # demonstrations of each recipe


def make_model(model: Path, output: Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    for file in model.iterdir():
        if file.name not in ("chat_template.jinja", "tokenizer_config.json"):
            link = output / file.name
            link.unlink(missing_ok=True)
            link.symlink_to(file.resolve())
    settings = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings.pop("chat_template", None)
    (output / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    shutil.copyfile(TEMPLATE, output / "chat_template.jinja")


def write_demonstrations(output: Path) -> None:
    kinds = {
        "calculator": (calculator, calculator.Calculator),
        "retrieval": (retrieval, retrieval.Encyclopaedia),
        "structured": (structured, structured.Structured),
    }
    for name, (module, environment) in kinds.items():
        tools = list(tools_of(environment).values()) or None
        conversations = module.demonstrations("demonstrations", COUNT)
        lines = [
            json.dumps({"id": f"{name}-{number}", "messages": messages, "tools": tools}) + "\n"
            for number, messages in enumerate(conversations)
        ]
        (output / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("models/smollm2"))
    parser.add_argument("--output", type=Path, default=Path("runs/recipes"))
    given = parser.parse_args()
    make_model(given.model, given.output / "model")
    write_demonstrations(given.output)
    print(f"{given.output} has the model and {COUNT} demonstrations of each recipe with a warm-up")


if __name__ == "__main__":
    main()
