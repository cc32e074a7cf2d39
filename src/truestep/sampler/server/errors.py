"""What can go wrong with a server, by what is done about it."""

from truestep.errors import TruestepError


class ServerError(TruestepError):
    """The run cannot go on with this server as it is, and why."""


class WeightsError(ServerError):
    """A server has been given the trainer's weights and does not score as the trainer does."""


class UnreachableError(Exception):
    """No answer, or none of the server's own making: ask again later, or another."""


class BadAnswerError(Exception):
    """An answer that must not become a document. The reason is for rejected.jsonl."""


class VoidedError(Exception):
    """The weights were replaced while a completion was made, so that nobody can say which of them made it."""
