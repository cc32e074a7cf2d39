from truestep.errors import TruestepError


class SessionError(TruestepError):
    """Raised if a session's method is called at the wrong time, or with arguments that it cannot use."""
