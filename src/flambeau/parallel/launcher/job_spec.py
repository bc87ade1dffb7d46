"""The arguments of a launcher, and their checks. No torch here, so that errors come at once."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass

from flambeau.errors import InputError


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """The arguments of a launcher.

    Attributes:
        command: program and arguments, with `${local_rank}` for the rank's number on this machine.
        nodes: minimum and maximum; below the maximum the job continues without lost ones.
        rendezvous: HOST:PORT, the same on all of several nodes, of which HOST is one.
        node_rank: of this node; without it torch sorts the nodes.
        max_restarts: of all ranks, after one has failed.
        local_addr: by which other nodes reach this one.
        join_timeout_s: to wait for other nodes.
    """

    command: Sequence[str]
    procs: int
    nodes: tuple[int, int] = (1, 1)
    rendezvous: str | None = None
    job_id: str = "flambeau"
    node_rank: int | None = None
    max_restarts: int = 0
    local_addr: str | None = None
    join_timeout_s: int = 600

    @property
    def is_ordered(self) -> bool:
        """The nodes have given ranks: torch's static rendezvous supports them."""
        return self.node_rank is not None and self.nodes[0] == self.nodes[1] > 1

    def check(self) -> None:
        if not self.command or shutil.which(self.command[0]) is None:
            name = "".join(self.command[:1])
            raise InputError(f"there is no program {name!r} to run on the ranks")
        if self.procs < 1:
            raise InputError(f"a machine needs at least one process; got {self.procs}")
        if self.max_restarts < 0:
            raise InputError(f"--max-restarts counts from 0; got {self.max_restarts}")
        self._check_nodes()

    def _check_nodes(self) -> None:
        fewest, most = self.nodes
        if not 1 <= fewest <= most:
            raise InputError(
                f"the number of nodes is N or MIN:MAX, from 1 and not falling; got {fewest}:{most}"
            )
        if most > 1 and self.rendezvous is None:
            raise InputError(
                f"{most} nodes need a place to meet: give each --rdzv HOST:PORT, with the name of one of them"
            )
        if self.local_addr is not None and self.rendezvous is None:
            raise InputError("--local-addr is for several nodes, which meet at --rdzv HOST:PORT")
        if self.node_rank is not None and not 0 <= self.node_rank < most:
            raise InputError(
                f"--node-rank of {most} nodes is from 0 to {most - 1}; got {self.node_rank}"
            )
        if not self.job_id.replace("-", "").replace("_", "").isalnum():
            raise InputError(f"--job-id is made of letters, digits, - and _; got {self.job_id!r}")
        if self.join_timeout_s < 1:
            raise InputError(f"--join-timeout is at least 1 second; got {self.join_timeout_s}")
