"""A rank that does not outlive its launcher: what stands between torch's agent and the rank's program.

The agent starts it with its own Python, isolated and without site-packages; see agent.py.
"""

import os
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def become(arguments: Sequence[str]) -> None:
    """Turn this process into the rank's program, tied to its launcher: both keep the process id.

    Where the kernel is Linux, the rank gets SIGKILL when the launcher ends, however that ends.

    Args:
        arguments: process id of the launcher, the program, its arguments.
    """
    launcher, *command = arguments
    if sys.platform == "linux":
        import ctypes
        import signal

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(launcher):  # it has ended before it could be watched
            os._exit(1)
    os.execvp(command[0], command)
