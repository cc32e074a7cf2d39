"""Writes docs/families.md, after trying every family.

    PYTHONPATH=src:tests python -m families.page [FAMILY ...] --kept DIRECTORY > docs/families.md

What has been tried is kept in the directory, a file for each family, and not tried again.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import textwrap
from collections.abc import Mapping
from pathlib import Path

import transformers

from families.columns import COLUMNS, YES, try_family
from families.tiny_families import families

Rows = Mapping[str, Mapping[str, str]]
_WIDTH = 120

_HEAD = """\
# Model families

This page is written by a program that tries each family that transformers {version} has a causal language model for
(`tests/families`). Each gets a tiny random model in float32 on a CPU. {count} of {all} train.

| column | yes means |
| --- | --- |
| trains | packed documents give the log-probs and every gradient that transformers gives for each document alone, within 1e-5 |
| context, tensor, pipeline | a step over two ranks has the gradients of a step in one process |
| LoRA | an adapter on all linear layers computes what the merged model computes in transformers |
| engine | log-probs of tokens that the sampler's engine draws are those of training, within 3e-5; else static batches draw |
| exact | the engine's hidden states equal training's bit by bit, as `sampler.exact` asks |
| export | trained weights leave under the names that they came with, and compute the same in transformers |

Where rounding takes transformers' own float32 further than 1e-5 from its float64, ours may be twice as far. A number
stands for a reason, of those [below](#reasons). A real model of a family may have options that the tiny one has not:
every model is checked in the same way when it is loaded, and refused with a reason if it would be trained wrongly. A
directory with towers for images or sound (`...ForConditionalGeneration`) is trained as the text model in it.
"""


def write(rows: Rows) -> str:
    trained = [name for name in rows if rows[name]["trains"] == YES]
    reasons: dict[str, int] = {}
    lines = [
        _HEAD.format(version=transformers.__version__, count=len(trained), all=len(rows)),
        "## Families that train\n",
        f"| family | {' | '.join(COLUMNS)} |",
        f"| --- |{' --- |' * len(COLUMNS)}",
    ]
    for name in trained:
        cells = [rows[name].get(column, "") for column in COLUMNS]
        shown = [cell if cell == YES else str(reasons.setdefault(_short(cell), len(reasons) + 1)) for cell in cells]
        lines.append(f"| {name} | {' | '.join(shown)} |")
    lines.append("\n## Reasons\n")
    lines += [_wrapped(f"{number}. ", reason) for reason, number in reasons.items()]
    lines.append("\n## Families that are refused\n")
    refused: dict[str, list[str]] = {}
    for name in rows:
        if name not in trained:
            refused.setdefault(_short(rows[name]["trains"]), []).append(name)
    lines += [_wrapped("- ", f"{', '.join(names)}: {reason}") for reason, names in refused.items()]
    return "\n".join(lines) + "\n"


def _wrapped(begin: str, text: str) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent=begin, subsequent_indent=" " * len(begin), break_long_words=False)


_MODEL_CLASS = re.compile(r"\b[A-Za-z0-9_]+(ForCausalLM|LMHeadModel|ForConditionalGeneration|ModelWithLMHead|Decoder)\b")


def _short(reason: str) -> str:
    """Make reasons that differ in a model's name alone the same."""
    reason = _MODEL_CLASS.sub("the model", reason)
    reason = re.sub(r" \(relative difference [^)]*\)", "", reason)
    reason = reason.replace("model.path: the model could not be loaded: ", "").replace("|", "/")
    return reason[:1].lower() + reason[1:]


def try_all(names: list[str], kept: Path) -> Rows:
    kept.mkdir(parents=True, exist_ok=True)
    for name in names:
        file = kept / f"{name}.json"
        if not file.is_file():
            with tempfile.TemporaryDirectory() as directory:
                try:
                    found = try_family(name, Path(directory))
                except Exception as error:  # a fault: the others are still tried
                    found = {"trains": f"a fault: {type(error).__name__}: {error}"[:300]}
            file.write_text(json.dumps(found, indent=1), encoding="utf-8")
            print(name, found, file=sys.stderr, flush=True)
    return {name: json.loads((kept / f"{name}.json").read_text(encoding="utf-8")) for name in names}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("families", nargs="*", default=families())
    parser.add_argument("--kept", type=Path, required=True)
    options = parser.parse_args()
    print(write(try_all(options.families, options.kept)), end="")
