"""Errors about a model that a user can mend."""

from __future__ import annotations

from truestep.errors import TruestepError


class ModelError(TruestepError):
    """A model that cannot be trained, with the reason."""


class CutError(TruestepError):
    """A model that cannot be cut as was asked, with the reason."""


class ContextError(TruestepError):
    """A model whose heads cannot be shared out."""
