"""The errors that a user can mend: each is shown as one message, without a traceback."""

from __future__ import annotations


class TruestepError(Exception):
    """The base of every error whose message is written for the user."""
