"""One start of the ranks: what its watch makes of their reports, whenever they come."""

import json
import os
import socket
from pathlib import Path

from flambeau.parallel.launcher.attempt import Attempt
from flambeau.parallel.launcher.rank_processes import RankProcesses
from flambeau.parallel.preemption import OUT_OF_MEMORY
from flambeau.parallel.watchdog.watchdog import LOST_PEER


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
    watched = Attempt(
        ranks, None, rendezvous="here", signals=[], num_restarts=(0, 0), say=lambda text: None
    )
    assert ranks.started and watched.poll()
    assert watched.outcome is not None and watched.outcome.code == 1
    host, process = socket.gethostname(), os.getpid()
    line = f"rank 0 of 2 (host {host}, process {process}) ended with exit code 3"
    assert watched.outcome.line == line


def restarted(folder: Path, *, can_halve: bool) -> tuple[Attempt, list[str]]:
    """Rank 1 has run out of memory, and rank 0 has lost it."""
    ranks, said = RankProcesses(folder, 2, {}), list[str]()
    report(ranks.folder, 0, code=LOST_PEER)
    report(ranks.folder, 1, code=OUT_OF_MEMORY)
    ranks.poll()
    watched = Attempt(
        ranks, None, rendezvous="here", signals=[], num_restarts=(0, 0), can_halve=can_halve, say=said.append
    )  # fmt: skip
    assert watched.poll()
    return watched, said


def test_out_of_memory_is_no_failure(tmp_path: Path) -> None:
    """All are started again, as often as a batch can be halved; no restart was asked for."""
    watched, (line,) = restarted(tmp_path / "1", can_halve=True)
    assert watched.outcome is None
    assert watched.ending is not None and not watched.ending.is_failure
    assert line.startswith("flambeau: rank 1 of 2 ") and line.endswith("; starting the ranks again")
    watched, said = restarted(tmp_path / "2", can_halve=False)
    assert watched.outcome is not None and watched.outcome.code == 1 and not said
