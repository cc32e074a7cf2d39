"""Errors that are reported to clients."""


class ApiError(Exception):
    """A request that is refused immediately, with an HTTP status."""

    def __init__(self, message: str, status: int = 400, wait: float | None = None):
        """`wait`: seconds after which the client may send the request again."""
        super().__init__(message)
        self.status, self.wait = status, wait


class JobError(Exception):
    """A request that was accepted but cannot be computed; the request is at fault."""


class ServerError(Exception):
    """An internal error of this server. Clients see only its class name, and it keeps no reference to the request."""


def not_served(what: str) -> ApiError:
    return ApiError(f"{what} is not served here")


def unknown(what: str) -> ApiError:
    """Return the error for a thing that does not exist, or belongs to another tenant."""
    return ApiError(f"there is no such {what}", 404)
