"""Errors that a client gets."""


class ApiError(Exception):
    """A request that is refused at once, with an HTTP status."""

    def __init__(self, message: str, status: int = 400):
        super().__init__(message)
        self.status = status


class JobError(Exception):
    """A request that was taken and cannot be computed, by a fault of its own."""


class ServerError(Exception):
    """A fault of this server, of which a client learns the name alone. It keeps nothing of the request alive."""


def not_served(what: str) -> ApiError:
    return ApiError(f"{what} is not served here")


def unknown(what: str) -> ApiError:
    """What is not there, or is another tenant's."""
    return ApiError(f"there is no such {what}", 404)
