"""`flambeau launch`: the same command in several processes, on one machine or on many."""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from flambeau.errors import InputError, nearest
from flambeau.terminal import say

HELP = "run train, or a script, on several processes and machines"

_EXAMPLES = """\
flambeau launch --procs 4 -- train photos/
flambeau launch --nnodes 2 --rdzv node1:29500 -- train photos/     (the same on both machines)
flambeau launch --nnodes 1:4 --rdzv node1:29500 --max-restarts 3 -- my_script.py --lr 0.1
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "flambeau launch [FLAGS] -- (train ... | SCRIPT.py ... | -m MODULE ...)"
    parser.epilog = _EXAMPLES
    add = parser.add_argument
    add(
        "--procs",
        metavar="N|auto",
        default="auto",
        help="processes on this machine (default: one per GPU)",
    )
    add("--nnodes", metavar="N|MIN:MAX", default="1", help="how many machines (default: 1)")
    add(
        "--rdzv",
        metavar="HOST:PORT",
        help="where they meet: the same on all, HOST being one of them",
    )
    add("--job-id", metavar="ID", help="a name, the same on all machines (default: flambeau)")
    add("--node-rank", metavar="N", type=int, help="place of this machine in the order of ranks")
    add(
        "--max-restarts",
        metavar="N",
        type=int,
        default=0,
        help="how often all start again after one has failed (default: 0)",
    )
    add("--local-addr", metavar="ADDR", help="by which the others reach this machine")
    add(
        "--join-timeout",
        metavar="S",
        type=int,
        default=600,
        help="seconds to wait for the others (default: 600)",
    )
    add(
        "--local-rank",
        action="store_true",
        help="also give each process --local_rank=N, for a script of the old launcher",
    )
    add("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    words = arguments.command[arguments.command[:1] == ["--"] :]
    command = _command(words, with_local_rank=arguments.local_rank)
    nodes = _nodes(arguments.nnodes)
    procs = number_of_procs(arguments.procs)

    from flambeau.parallel.launcher.job_spec import JobSpec
    from flambeau.parallel.launcher.launch import launch
    from flambeau.run.folder.events_log import note_lost_rank

    spec = JobSpec(
        command=command,
        procs=procs,
        nodes=nodes,
        rendezvous=arguments.rdzv,
        job_id=JobSpec.job_id if arguments.job_id is None else arguments.job_id,
        node_rank=arguments.node_rank,
        max_restarts=arguments.max_restarts,
        local_addr=arguments.local_addr,
        join_timeout_s=arguments.join_timeout,
    )
    return launch(spec, say=say, note_lost_rank=note_lost_rank)


def number_of_procs(text: str) -> int:
    """The number of processes that --procs requests."""
    if text == "auto":
        from flambeau.parallel.launcher.launch import auto_procs

        return auto_procs()
    if re.fullmatch("0*[1-9][0-9]{0,8}", text) is None:
        raise InputError(f"--procs must be a number above 0, or auto; got {text!r:.50}")
    return int(text)


def _nodes(text: str) -> tuple[int, int]:
    numbers = text.split(":")
    if len(numbers) > 2 or not all(re.fullmatch("[0-9]{1,9}", number) for number in numbers):
        raise InputError(f"--nnodes must be a number, or MIN:MAX; got {text!r:.50}")
    return int(numbers[0]), int(numbers[-1])


def _command(words: Sequence[str], *, with_local_rank: bool) -> list[str]:
    """What each rank runs, by this Python."""
    from flambeau.cli.command import VERBS, check

    if not words:
        raise InputError(
            "nothing to run: flambeau launch [FLAGS] -- train ..., or -- SCRIPT.py ..."
        )
    name = words[0]
    count = 1  # words that say what to run; the rest are its arguments
    head = [sys.executable]
    if name in VERBS:
        if name != "train":
            raise InputError(
                f"launch runs train, or a script; {name} takes one process, without it"
            )
        check(words)
        if any(word == "--procs" or word.startswith("--procs=") for word in words):
            raise InputError("--procs is launch's here: put it before the --")
        head += ["-m", "flambeau"]
    elif name == "-m" and len(words) > 1:
        count = 2
    elif not Path(name).is_file():
        raise InputError(f"{name!r} is neither a script nor a command{nearest(name, VERBS)}")
    # Torch's agent fills in the number. The old launcher put it before other arguments.
    local_rank = ["--local_rank=${local_rank}"] if with_local_rank else []
    return [*head, *words[:count], *local_rank, *words[count:]]
