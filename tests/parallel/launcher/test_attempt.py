"""One start of the ranks: what its watch makes of their reports, whenever they come."""

import json
import os
import socket
from pathlib import Path

from flambeau.parallel.launcher.attempt import Round
from flambeau.parallel.launcher.rank_processes import RankProcesses


def report(folder: Path, number: int, *, code: int | None = None) -> None:
    """As a supervisor does; this process stands for it and for the rank."""
    here = os.getpid()
    (folder / f"{number}.started").write_text(json.dumps([number, 2, 0, 1, here, here]))
    if code is not None:
        (folder / f"{number}.ended").write_text(str(code))


def test_a_rank_that_failed_before_the_first_look_is_a_failure(tmp_path: Path) -> None:
    """It had started and ended between two looks for ranks that have started."""
    ranks = RankProcesses(tmp_path / "1", 1, {})
    report(ranks.folder, 0, code=3)
    ranks.poll()  # as the launcher does until somebody has started
    watched = Round(
        ranks, None, place="here", signals=[], num_restarts=(0, 0), say=lambda text: None
    )
    assert ranks.started and watched.look()
    assert watched.outcome is not None and watched.outcome.code == 1
    host, process = socket.gethostname(), os.getpid()
    line = f"rank 0 of 2 (host {host}, process {process}) ended with exit code 3"
    assert watched.outcome.line == line
