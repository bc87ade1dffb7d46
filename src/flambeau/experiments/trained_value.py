"""What came of a run of a sweep: whether it has paused, and what its script printed."""

from pathlib import Path

from flambeau.run.folder.json_file import finite_number, json_row
from flambeau.run.folder.pause_file import paused_after

_TAIL_BYTES = 2**20  # of a log


def has_paused(run: Path, epochs: int | None) -> bool:
    """Whether the run has stopped at the end of these epochs, or of more."""
    return epochs is not None and paused_after(run) >= epochs


def figure_in(log: Path, name: str) -> float | None:
    """The figure of this name in a log's last line that is a JSON object with it."""
    for line in reversed(tail(log)):
        row = json_row(line)
        if row is not None and name in row:
            return finite_number(row[name])
    return None


def last_words(log: Path) -> str:
    """The last line of a log that says anything."""
    lines = [line.strip() for line in tail(log) if line.strip()]
    return lines[-1].decode(errors="replace")[:300] if lines else ""


def tail(log: Path) -> list[bytes]:
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            return file.read(_TAIL_BYTES).splitlines()
    except OSError:
        return []
