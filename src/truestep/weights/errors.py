"""The error for models that cannot be trained."""

import re
from pathlib import Path

from truestep.errors import TruestepError


class ModelError(TruestepError):
    """Raised if a model cannot be trained, or not over these ranks. The message says why."""


class RuinedError(ModelError):
    """Raised if the weights themselves cannot be used, whatever the options and the machine."""


def no_model(directory: Path) -> str:
    """Return the error message for a directory without a model, with advice if it looks like a hub name."""
    problem = f"model.path: {directory} is not a Hugging Face model directory: it has no config.json"
    name = str(directory)
    if directory.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or name.startswith("."):
        return problem
    local = f"models/{directory.name}"
    return (
        f"{problem}. If {name} is a name on the Hugging Face hub, download it "
        f"(`hf download {name} --local-dir {local}`) and write model.path: {local}"
    )
