"""The one exception that means 'the user can mend this': what, where, what to do."""


class InputError(ValueError):
    """Wrong input, in one or two lines that name the thing and what to do about it.

    The command prints the message without a traceback and exits with 2.
    """


class WorkerLost(RuntimeError):
    """A data worker has died or stands still; the message names it, and the sample that it read.

    The command prints the message without a traceback and exits with 1: the same command may go on.
    """
