"""truestep: RL fine-tuning of language models in which every step is exactly the step you asked for.

The names below are the Python interface (docs/python.md). Each is imported when it is first used, so that
`import truestep` takes no time.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

__version__ = "0.1.0"

_HOME = {  # the module that defines each public name
    "Config": "truestep.config.load",
    "ConfigError": "truestep.config.load",
    "load_config": "truestep.config.load",
    "dump_config": "truestep.config.load",
    "TruestepError": "truestep.errors",
    "train": "truestep.commands.running",
    "Session": "truestep.commands.session.session",
    "Sample": "truestep.commands.session.samples",
    "TrainingResult": "truestep.commands.running",
    "score": "truestep.commands.looking",
    "verify": "truestep.commands.looking",
    "parity": "truestep.commands.looking",
    "audit": "truestep.commands.looking",
    "plan": "truestep.commands.looking",
    "replay": "truestep.commands.looking",
    "bisect": "truestep.commands.looking",
    "compare": "truestep.commands.looking",
    "serve": "truestep.commands.looking",
    "export": "truestep.commands.looking",
    "convert": "truestep.commands.looking",
    "Verification": "truestep.commands.looking",
    "MemoryPlan": "truestep.commands.looking",
    "Score": "truestep.tools.score",
    "Parity": "truestep.tools.parity.gap",
    "Audit": "truestep.tools.audit.run",
    "Finding": "truestep.tools.audit.finding",
    "Replay": "truestep.tools.replay.replay",
    "Bisection": "truestep.tools.replay.bisect",
    "Comparison": "truestep.tools.replay.compare",
    "init": "truestep.tools.init.make",
    "write_report": "truestep.report",
    "check_files": "truestep.rollouts.check",
    "DataSummary": "truestep.rollouts.check",
    "Callback": "truestep.run.callbacks",
    "CallbackError": "truestep.run.callbacks",
    "Run": "truestep.run.callbacks",
    "Rollout": "truestep.types",
    "Sink": "truestep.metrics.sinks",
    "Environment": "truestep.environments.episodes.environment",
    "Answer": "truestep.environments.episodes.environment",
    "End": "truestep.environments.episodes.environment",
    "ToolCall": "truestep.environments.episodes.environment",
    "tool": "truestep.environments.episodes.environment",
    "LabelLoss": "truestep.losses.label_losses",
    "LabelTerm": "truestep.losses.label_losses",
    "Labels": "truestep.losses.labels",
    "InferenceServer": "truestep.generate.servers.protocol",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'truestep' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Keeps public functions when a module of the same name is imported: `import truestep.plan` does not replace the
    function `plan`."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
