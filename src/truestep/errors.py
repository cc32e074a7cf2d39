"""What a person can mend: shown as one message, without a traceback."""

from __future__ import annotations


class TruestepError(Exception):
    """The base of every error whose message is written for the user."""
