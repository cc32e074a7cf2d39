"""The error about a model that a user can mend."""

import re
from pathlib import Path

from truestep.errors import TruestepError


class ModelError(TruestepError):
    """A model that cannot be trained, or not over these ranks, with the reason."""


def no_model(directory: Path) -> str:
    """Say that a directory is no model's, and what to do where it looks like a name on the Hugging Face hub."""
    problem = f"model.path: {directory} is not a Hugging Face model directory: it has no config.json"
    name = str(directory)
    if directory.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or name.startswith("."):
        return problem
    local = f"models/{directory.name}"
    return (
        f"{problem}. If {name} is a name on the Hugging Face hub, download it "
        f"(`hf download {name} --local-dir {local}`) and write model.path: {local}"
    )
