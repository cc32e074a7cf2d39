"""The errors that a user can mend: each is shown as one message, without a traceback."""


class TruestepError(Exception):
    """The base of every error whose message is written for the user."""
