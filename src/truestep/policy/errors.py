"""The error about a model that a user can mend."""

from truestep.errors import TruestepError


class ModelError(TruestepError):
    """A model that cannot be trained, or not over these ranks, with the reason."""
