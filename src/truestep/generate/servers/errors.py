"""Errors of servers, by what is done about them."""

from truestep.errors import TruestepError


class ServerError(TruestepError):
    """A server with which the run cannot go on as it is."""


class WeightsError(ServerError):
    """A server has been given the trainer's weights and does not score as the trainer does."""


class UnreachableError(Exception):
    """No answer, or none of the server's own making: the request may succeed later, or elsewhere."""


class ForgottenError(UnreachableError):
    """The server answers, and no longer has what it was given: it is another process by now."""


class BadAnswerError(Exception):
    """An answer that must not become a document. The reason is for rejected.jsonl."""


class VoidedError(Exception):
    """A completion during which weights were replaced, so that nobody can say which of them made it."""
