"""What a script prints, of which only the end is kept."""

import os
import threading
from typing import IO

_KEPT_BYTES = 2**16
_LINES = 12
_LONGEST_LINE = 300
"""How much is kept, and how much of it a message shows; chosen."""


class ScriptOutput:
    """A pipe for a script to print to, read as fast as it prints.

    `close` it when the script has ended.
    """

    def __init__(self) -> None:
        reading, self._writing = os.pipe()
        self._kept = b""
        self._pipe: IO[bytes] = os.fdopen(reading, "rb", buffering=0)
        self._thread = threading.Thread(target=self._read, name="flambeau-output", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """The end that the script writes to."""
        return self._writing

    def started(self) -> None:
        """The script has its end of the pipe; ours would keep it open for ever."""
        os.close(self._writing)
        self._writing = -1

    def close(self) -> None:
        """Wait for the last bytes; a process that nobody could end may hold the pipe open."""
        if self._writing >= 0:
            self.started()
        self._thread.join(2.0)

    @property
    def last_lines(self) -> str:
        """Its last lines, each with its begin and end if it is long."""
        lines = self._kept.decode(errors="replace").splitlines()[-_LINES:]
        return "\n".join(_shortened(line) for line in lines).strip()

    def _read(self) -> None:
        with self._pipe as pipe:
            while some := pipe.read(_KEPT_BYTES):
                self._kept = (self._kept + some)[-_KEPT_BYTES:]


def _shortened(line: str) -> str:
    if len(line) <= _LONGEST_LINE:
        return line
    half = (_LONGEST_LINE - 5) // 2
    return f"{line[:half]} ... {line[-half:]}"
