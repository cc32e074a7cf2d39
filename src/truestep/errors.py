"""The base class of errors that a user can fix. The command shows their message without a traceback."""


class TruestepError(Exception):
    """The base class of errors with a message for the user."""


class MachineError(TruestepError):
    """An error of one machine, which may not occur on another."""
