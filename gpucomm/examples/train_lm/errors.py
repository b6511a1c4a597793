"""What the user can put right: told in one line, without a traceback."""


class JobError(Exception):
    """Bad input or a machine that cannot do what was asked; the message is the whole line."""
