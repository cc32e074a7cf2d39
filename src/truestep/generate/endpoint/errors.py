"""Errors for programs, in the form that OpenAI's clients expect."""

from typing import Any


class RequestError(Exception):
    """A request that is refused."""

    def __init__(self, message: str, status: int = 400, code: str | None = None, param: str | None = None):
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    @property
    def body(self) -> dict[str, Any]:
        kind = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 503: "server_error"}
        of_kind = kind.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": of_kind, "param": self.param, "code": self.code}}
