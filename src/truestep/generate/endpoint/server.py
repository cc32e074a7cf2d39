"""The endpoint's HTTP server, in a thread of its own."""

import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

from truestep.errors import TruestepError
from truestep.generate.endpoint.keys import Keys

_MOST_CONNECTIONS = 4096
_END_SECONDS = 10.0


class EndpointError(TruestepError):
    pass


class Endpoint:
    """Serves documents until it is closed."""

    def __init__(
        self,
        keys: Keys,
        model: str,
        host: str = "127.0.0.1",
        port: int = 0,
        accepts: Callable[[str], bool] = lambda host: True,
        routes: Sequence[Any] = (),
    ):
        """`port` 0: any free port. `accepts` tells whether a request is answered, given its Host header. `routes` are
        routes of another protocol."""
        try:
            import uvicorn

            from truestep.generate.endpoint.app import make_app
        except ImportError as error:
            raise EndpointError(
                f"the endpoint needs uvicorn and starlette ({error}): pip install 'truestep[endpoint]'"
            ) from None
        self._socket = _listening(host, port)
        self.host, self.port = self._socket.getsockname()[:2]
        settings: dict[str, Any] = {"log_level": "critical", "access_log": False, "lifespan": "off"}
        settings |= {"limit_concurrency": _MOST_CONNECTIONS, "server_header": False, "timeout_graceful_shutdown": 1}
        self._server = uvicorn.Server(uvicorn.Config(make_app(keys, model, accepts, routes), **settings))
        self._thread = threading.Thread(target=self._serve, name="endpoint", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """The base URL for OpenAI's clients."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/v1"

    def _serve(self) -> None:
        self._server.run(sockets=[self._socket])

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(_END_SECONDS)
        self._socket.close()


def _listening(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise EndpointError(f"the endpoint cannot listen on {host}, port {port}: {error.strerror or error}") from None
