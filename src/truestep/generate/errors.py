"""Errors of servers, by how they are handled."""

from truestep.errors import TruestepError


class ServerError(TruestepError):
    """The server refuses a request and would refuse it again: the run ends, or the server counts as lost."""


class WeightsError(ServerError):
    """The server has loaded the trainer's weights, and its log-probs differ from the trainer's: the run ends."""


class UnreachableError(Exception):
    """The server did not answer, or is overloaded: the request may succeed later or at another server."""


class ForgottenError(UnreachableError):
    """The server answers, but has lost what was sent to it, because it was restarted."""


class BadAnswerError(Exception):
    """The answer is invalid and must not become a document. The message is written to rejected.jsonl."""


class VoidedError(Exception):
    """The weights were replaced while a completion was in flight, so the version of its tokens is unknown."""
