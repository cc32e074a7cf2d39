"""Environments of other packages, selected by `sampler.environment.type`. Each needs a package that an extra installs.

reasoning_gym     tasks of the package reasoning-gym, with its own prompts and scores
openenv           environments that an OpenEnv server serves
verifiers         environments of the package verifiers, which request completions themselves
math_verify       not an environment but a reward: math-verify compares a completion with the prompt's `answer`
apart             runs a computation in a separate process, which can be killed
"""

from truestep.config.custom import CustomError

ADAPTERS = {  # import paths of their classes
    "reasoning_gym": "truestep.environments.adapters.reasoning_gym:ReasoningGym",
    "openenv": "truestep.environments.adapters.openenv:OpenEnv",
    "verifiers": "truestep.environments.adapters.verifiers:Verifiers",
}
# Environments that request completions from the run's endpoint, as programs do (`episodes.program`).
ASKING = ("verifiers",)


def missing(what: str, extra: str, error: ImportError) -> CustomError:
    """Return the error for a package that is not installed. `what` is the option that needs it."""
    return CustomError(f"{what} needs `pip install 'truestep[{extra}]'`: {error}")
