"""Reads the bodies of requests."""

import json
from typing import Any

from starlette.requests import Request

from truestep.commands.tinker.errors import ApiError

_LARGEST_BODY = 2**26  # most bytes of a body


async def read_body(request: Request) -> bytes:
    body, too_large = await read_beginning(request)
    if too_large is not None:
        raise too_large
    return body


async def read_beginning(request: Request) -> tuple[bytes, ApiError | None]:
    """Read a body. If it is too large, return its beginning and an error."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > _LARGEST_BODY:
            return bytes(body[:_LARGEST_BODY]), ApiError(f"the body has more than {_LARGEST_BODY} bytes", 413)
    return bytes(body), None


def read_json(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        raise ApiError("the body is not JSON") from None
    if not isinstance(value, dict):
        raise ApiError("the body is not an object of JSON")
    return value
