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
| trains | packed documents give the log-probs and every gradient of each document alone in transformers, within 1e-5 |
| context, tensor, pipeline | a step over two ranks has the gradients of a step in one process |
| LoRA | an adapter on all linear layers computes what the merged model computes in transformers |
| engine | log-probs of tokens that the sampler's engine draws are training's, within 3e-5; else static batches draw |
| exact | the engine's hidden states equal training's bit by bit, as `sampler.exact` asks |
| export | trained weights leave under the names that they came with, and compute the same in transformers |

Where rounding takes transformers' own float32 further than 1e-5 from its float64, ours may be thrice as far. A number
stands for a reason, of those [below](#reasons), a dash for what was not tried. A real model of a family may have
options that the tiny one has not: every model is checked in the same way when it is loaded, and refused with a reason
if it would be trained wrongly. A directory with towers for images or sound (`...ForConditionalGeneration`) is trained
as the text model in it; the towers leave with an export as they came.
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
        shown = [cell if cell == YES else _number(cell, reasons) for cell in cells]
        lines.append(f"| {name} | {' | '.join(shown)} |")
    lines.append("\n## Reasons\n\n```text")
    lines += [_wrapped(f"{number:2} ", reason) for reason, number in reasons.items()]
    lines.append("```\n\n## Families that are refused\n\n```text")
    refused: dict[str, list[str]] = {}
    for name in rows:
        if name not in trained:
            refused.setdefault(_short(rows[name]["trains"]), []).append(name)
    for reason, names in refused.items():
        lines += [_wrapped("", f"{reason}:"), _wrapped("    ", ", ".join(names))]
    lines.append("```")
    return "\n".join(lines) + "\n"


def _number(reason: str, reasons: dict[str, int]) -> str:
    """Return the number of a reason; a dash if the column was not tried."""
    return str(reasons.setdefault(_short(reason), len(reasons) + 1)) if reason else "-"


def _wrapped(begin: str, text: str) -> str:
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=begin,
        subsequent_indent=" " * len(begin),
        break_long_words=False,
        break_on_hyphens=False,
    )


_OWN = "its attention, or what it has instead, is code of its own: documents cannot be packed"
# What is said of a reason on the page, if it is not the reason itself.
_NOTES = (
    (r"parallel.tensor: \S+ has no plan", "transformers has no plan for tensor parallelism of it (base_model_tp_plan)"),
    (
        r"parallel.tensor: \S+ plan has \S+: (\w+);",
        r"transformers' plan for tensor parallelism of it has {1}; only colwise and rowwise are supported",
    ),
    (r"parallel.tensor: (.*): set parallel.tensor: 1", "parallel.tensor: {1}"),
    (
        r"sampler.exact: layers that keep a state",
        "layers that keep a state add up in another order when they decode than when they read a whole document",
    ),
    (
        r"sampler.exact: this model computes ([\w.]+)",
        "it computes {1}, for which there is no proof that a row's result depends on that row alone",
    ),
    (r"sampler.exact needs the engine, which does not serve this model: (.*)", "it needs the engine: {1}"),
    (r"elsewhere than behind its layers", "modules outside its layers and embedding run before the last layer"),
    (r"give other values .* by code of its own", _OWN),
    (
        r"packed documents give other values",
        "packed documents give other values than each alone: its layers mix tokens, or its code takes no positions",
    ),
    (
        r"cannot run packed documents, which have",
        "its code reads an attention mask, which packed documents do not have",
    ),
    (r"changes weights while it loads them", "transformers' code for it changes weights while it loads them"),
    (r"could not be loaded: \S+ computes attention", _OWN),
    (r"no LM head that is only a matrix", "it has no LM head that is only a matrix (it has none, or a bias)"),
    (r"has no body without a head", "it has no body without a head (its base_model_prefix names nothing)"),
    (r"no tiny model of it: \w+: (.*)", "no tiny model of it could be made: {1}"),
)
_LONGEST = 200


def _short(reason: str) -> str:
    """Say a reason in the same words for all families that have it."""
    for pattern, note in _NOTES:
        if (match := re.search(pattern, reason)) is not None:
            return note.replace("{1}", match[1] if match.groups() else "")[:_LONGEST]
    reason = re.sub(r"\b[A-Za-z0-9_]+For(CausalLM|ConditionalGeneration)\b", "it", reason)
    return reason[:_LONGEST]


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
