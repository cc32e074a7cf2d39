"""Sessions for samplers whose weights are not those of a live model."""

import threading
from collections import OrderedDict

from truestep.commands.session.session import Session

_MOST = 8


class SamplerSessions:
    """The sessions that were used last, by tenant and checkpoint path. Any thread may use them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sessions: OrderedDict[tuple[str, str], Session] = OrderedDict()

    def get(self, tenant: str, path: str) -> Session | None:
        with self._lock:
            return self._sessions.get((tenant, path))

    def keep(self, tenant: str, path: str, session: Session) -> None:
        with self._lock:
            self._sessions[tenant, path] = session
            self._sessions.move_to_end((tenant, path))
            while len(self._sessions) > _MOST:
                self._sessions.popitem(last=False)

    def drop(self, tenant: str, path: str) -> None:
        with self._lock:
            self._sessions.pop((tenant, path), None)
