"""The one exception that means 'the user can mend this': what, where, what to do."""


class InputError(ValueError):
    """Wrong input, in one or two lines that name the thing and what to do about it.

    The command prints the message without a traceback and exits with 2.
    """
