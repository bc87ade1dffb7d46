"""The progress bar on a terminal, and nothing where there is none."""

import sys
from typing import Any

from tqdm import tqdm


class ProgressBar:
    """One bar over all steps of a run, on standard error; lines go above it.

    Args:
        shown: False is silent about steps; lines are printed all the same.
        silent: no lines either.
    """

    def __init__(self, *, shown: bool, silent: bool = False) -> None:
        self._shown, self._silent = shown and not silent and sys.stderr.isatty(), silent
        self._bar: tqdm[Any] | None = None

    def start(self, *, done: int, total: int) -> None:
        """Show the bar, if it is to be shown and there is something left to do."""
        if self._shown and self._bar is None and done < total:
            # tqdm's monitor is a thread, and workers are forked: no thread that is not needed.
            tqdm.monitor_interval = 0
            self._bar = tqdm(initial=done, total=total, unit="step", dynamic_ncols=True)

    def step(self) -> None:
        """One step more."""
        if self._bar is not None:
            self._bar.update()

    def go_back(self, *, done: int) -> None:
        """So many steps are done, fewer than before."""
        if self._bar is not None:
            self._bar.reset(self._bar.total)
            self._bar.update(done)

    def note(self, text: str) -> None:
        """Figures at the right end of the bar."""
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)

    def say(self, text: str) -> None:
        """A line of its own, on standard error."""
        if not self._silent:
            tqdm.write(text, file=sys.stderr)

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
