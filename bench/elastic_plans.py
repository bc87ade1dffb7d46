"""Trains on changing numbers of ranks that are killed at random moments, and looks where each sample went.

    python bench/elastic_plans.py --plans 100 [--seed S] [--only NUMBER] [--out FILE] [--record]

A plan is a small training and its lives: on how many ranks (1 to 4) and data workers (0 to 2) each one runs,
and when SIGKILL ends it, sent to one rank or to all at once: while the ranks meet, between two batches of
training or evaluation, in the middle of a save. The last life runs to the end.
After the death of one rank the others are killed, as torchrun does; data workers must end by themselves.
Ranks are forked from this process, with the environment that torchrun gives them.

Three plans in four are elastic: each life has another number of ranks. Each rank writes down which samples it
was given; of each step, the last life that did it counts. All together must be the run of one process.
The others keep their number of ranks, 2, 3 or 4, and must end with the bits of a run that nobody killed.
With --parts all plans have steps in parts (docs/en/parallel.md), each life has another number of ranks, some
end by SIGTERM, and all must end with the bits of one process that nobody killed.

Linux only: it reads /proc. Prints one JSON line; the exit code is 1 if a plan went wrong.
tests/parallel/launcher/test_elastic.py runs the same code.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: ranks share few cores

import argparse
import dataclasses
import faulthandler
import json
import multiprocessing
import platform
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
import torch._dynamo  # an optimizer imports it: once here, not in each rank
import torch.distributed as dist
from torch import Tensor

from elastic_training import Life, Plan, make_plan, make_plan_in_parts, train  # beside this script
from flambeau.parallel.preemption import EXIT_CODE, Preempted
from flambeau.recipes.checkpoints.atomic_checkpoint import checkpoint_folders
from flambeau.recipes.data.sample_order import sample_order
from kill_storm import (
    checkpoint,
    compare,
    group_members,
    journal,
    leftovers,
    newest_step,
)

WAIT_S = 120  # for anything at all to happen; only a hang takes as long
GONE_S = 10  # all processes of a killed job must be gone
POLL_S = 0.001
# What a checkpoint or journal that has suffered makes a run say.
BAD = ("damaged", "lines are lost")
INEXACT = "not to the same bits"


class Batch(NamedTuple):
    """What a rank has noted of one batch."""

    kind: str
    step: int
    epoch: int
    indices: list[int]


class Job:
    """The ranks of one life, forked from this process.

    Args:
        plan: what they train.
        run: the run folder.
        life: how many they are.
        notes: a folder for what they note and say.
    """

    def __init__(self, plan: Plan, run: Path, life: Life, notes: Path) -> None:
        self.run, self.log = run, notes / "log.txt"
        notes.mkdir(parents=True)
        self.notes = [notes / f"rank-{rank}.jsonl" for rank in range(life.world)]
        self._leftovers_before = leftovers(run)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.processes = []
        for rank, path in enumerate(self.notes):
            environ = {
                "RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "GROUP_RANK": "0",
                "WORLD_SIZE": f"{life.world}", "LOCAL_WORLD_SIZE": f"{life.world}",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}",
            }  # fmt: skip
            process = multiprocessing.get_context("fork").Process(
                target=_rank, args=(plan, run, life.workers, path, self.log, environ)
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # 3.12: fork beside threads
                process.start()
            self.processes.append(process)

    def wait_for(self, happened: Callable[[], bool]) -> bool:
        """Return True as soon as `happened`, False where all ranks end well without it.

        Raises:
            RuntimeError: a rank fails by itself.
            TimeoutError: neither, for long.
        """
        deadline = time.monotonic() + WAIT_S
        while not happened():
            codes = [process.exitcode for process in self.processes]
            if any(codes):
                self.kill(victim=None)
                raise RuntimeError(f"exit codes {codes}:\n{self.log.read_text()}")
            if None not in codes:
                return False
            if time.monotonic() > deadline:
                self._ask_where([p.pid for p in self.processes if p.pid and p.exitcode is None])
                self.kill(victim=None)
                raise TimeoutError(f"nothing for {WAIT_S} s:\n{self.log.read_text()}")
            time.sleep(POLL_S)
        return True

    def num_batches(self) -> int:
        """How many rank 0 was given so far."""
        return self.notes[0].read_bytes().count(b"\n") if self.notes[0].exists() else 0

    def has_open_save(self) -> bool:
        """Whether a save or removal of this life is under way, or was when it was killed."""
        return bool(leftovers(self.run) - self._leftovers_before)

    def kill(self, *, victim: int | None, grace_s: float = 0.0) -> None:
        """SIGKILL to one rank and then to the others, or to all at once; never to their data workers."""
        if victim is not None:
            self.processes[victim].kill()
            time.sleep(grace_s)
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()

    def ask(self, *, victim: int | None) -> list[int | None]:
        """SIGTERM to one rank or to all, and their exit codes when they have left."""
        for process in self.processes if victim is None else [self.processes[victim]]:
            process.terminate()
        deadline = time.monotonic() + WAIT_S
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in self.processes]
        self.kill(victim=None)
        return codes

    def left(self) -> list[int]:
        """Processes that are still there when all should be gone, data workers included; killed now."""
        deadline = time.monotonic() + GONE_S
        groups = [process.pid for process in self.processes if process.pid]
        while alive := [pid for group in groups for pid in group_members(group)]:
            if time.monotonic() > deadline:
                self._ask_where(alive)
                for pid in alive:
                    os.kill(pid, signal.SIGKILL)
                return alive
            time.sleep(0.005)
        return []

    def _ask_where(self, pids: Sequence[int]) -> None:
        """Let processes write their stacks to the log."""
        for pid in pids:
            os.kill(pid, signal.SIGUSR2)
            time.sleep(0.5)

    def noted(self) -> list[list[Batch]]:
        """What each rank has noted."""
        return [
            [Batch(*json.loads(line)) for line in path.read_text().splitlines()]
            if path.exists()
            else []
            for path in self.notes
        ]


def _rank(
    plan: Plan, run: Path, workers: int, notes: Path, log: Path, environ: dict[str, str]
) -> None:
    """The life of one rank."""
    os.setpgid(0, 0)  # by which its data workers are found
    torch.set_num_threads(1)  # OpenMP hangs in a fork of a process that has used its threads
    os.environ.update(environ)
    output = log.open("a", buffering=1)
    sys.stdout = sys.stderr = output
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    faulthandler.register(signal.SIGUSR2, file=output)
    file = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(kind: str, step: int, epoch: int, indices: Tensor) -> None:
        # One call: whoever is killed has written the line or not.
        os.write(file, json.dumps([kind, step, epoch, indices.tolist()]).encode() + b"\n")

    try:
        train(plan, run, workers=workers, note=note)
    except Preempted:
        raise
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
    if dist.is_initialized():
        dist.destroy_process_group()


class Kill(NamedTuple):
    """A kill that came to happen.

    Attributes:
        life: that it ended.
        in_save: a save or removal of a checkpoint was under way.
        in_mid_epoch: the newest checkpoint is of the middle of an epoch.
    """

    life: Life
    in_save: bool
    in_mid_epoch: bool


@dataclass
class Outcome:
    """What has become of a plan.

    Attributes:
        lives: of each life, what its ranks have noted.
        kills: fewer than planned where the run came to its end too early.
        problems: what is wrong, in a line each.
    """

    lives: list[list[list[Batch]]] = dataclasses.field(default_factory=list)
    kills: list[Kill] = dataclasses.field(default_factory=list)
    problems: list[str] = dataclasses.field(default_factory=list)


def carry_out(plan: Plan, folder: Path) -> Outcome:
    """Live a plan to its end, then look at what it has left.

    Args:
        plan: of `make_plan`.
        folder: an empty one.

    Raises:
        RuntimeError, TimeoutError: a life failed by itself, or hangs.
    """
    found: dict[str, Outcome] = {}
    unkilled = Life(plan.lives[-1].world if plan.exact else 1, workers=0)
    for name, lives in {"unkilled": (unkilled,), "killed": plan.lives}.items():
        outcome, run = found.setdefault(name, Outcome()), folder / name
        for number, life in enumerate(lives):
            live(plan, life, run, folder / f"{name}-{number}", outcome)
        outcome.problems += check_samples(plan, outcome.lives) + check_journal(plan, journal(run))
    expected, outcome = found["unkilled"], found["killed"]
    outcome.problems += [f"never killed: {problem}" for problem in expected.problems]
    same = same_bits if plan.bits_count else same_numbers
    outcome.problems += same(plan, folder / "unkilled", folder / "killed")
    return outcome


def live(plan: Plan, life: Life, run: Path, notes: Path, outcome: Outcome) -> None:
    """One life, its end included."""
    job = Job(plan, run, life, notes)
    if _wait_for_moment(plan, life, job):
        time.sleep(life.delay_s)
        if life.asks:
            codes = job.ask(victim=life.victim)
            if set(codes) not in ({EXIT_CODE}, {0}):  # 0: it came to its end meanwhile
                outcome.problems.append(f"{life}: exit codes {codes}:\n{job.log.read_text()}")
        else:
            job.kill(victim=life.victim, grace_s=life.grace_s)
        in_mid_epoch = newest_step(run) % plan.steps_per_epoch > 0
        outcome.kills.append(Kill(life, job.has_open_save(), in_mid_epoch))
    left = job.left()
    said = job.log.read_text()
    if left:
        outcome.problems.append(f"{life}: processes {left} outlive their ranks:\n{said}")
    outcome.lives.append(job.noted())
    outcome.problems += [
        f"{life}: it said: {line}"
        for line in said.splitlines()
        if any(word in line for word in (*BAD, *[INEXACT] * plan.bits_count))
    ]


def _wait_for_moment(plan: Plan, life: Life, job: Job) -> bool:
    """Return True when it is time to kill, False where the life has ended well."""
    if life.end == "finish":
        return job.wait_for(lambda: False)
    if life.end == "start":
        return True
    batches = plan.total_steps * plan.accumulate + plan.epochs
    target = 1 + int(life.reach * batches)
    came = job.wait_for(lambda: job.num_batches() >= target)
    return came and (life.end == "batches" or job.wait_for(job.has_open_save))


def check_samples(plan: Plan, lives: Sequence[Sequence[Sequence[Batch]]]) -> list[str]:
    """What is wrong with the samples that the ranks were given.

    Args:
        plan: that was carried out.
        lives: of each life, of each rank, its batches.
    """
    problems = []
    seen: dict[int, list[int]] = {}
    for step in range(plan.total_steps):
        epoch, batch = divmod(step, plan.steps_per_epoch)
        order = sample_order(plan.length, seed=plan.seed, epoch=epoch).tolist()
        expected = order[batch * plan.global_batch :][: plan.global_batch]
        ranks = _last(lives, "train", "step", step)
        if plan.parts is None:
            # Every rank takes part in each micro-batch, and shares come in the order of the ranks.
            uneven = len({len(batches) for batches in ranks}) != 1
            shares = [
                share for of_micro_batch in zip(*ranks, strict=False) for share in of_micro_batch
            ]
        else:  # several of them on a rank, one after the other
            uneven = not all(ranks)
            shares = [share for batches in ranks for share in batches]
        taken = [i for share in shares for i in share.indices]
        epochs = {share.epoch for batches in ranks for share in batches}
        if uneven or taken != expected or epochs != {epoch}:
            problems.append(
                f"step {step} of epochs {epochs}: {taken}, expected {expected} of {epoch}"
            )
        seen.setdefault(epoch, []).extend(taken)
    for epoch, indices in seen.items():
        whole = plan.total_steps >= (epoch + 1) * plan.steps_per_epoch
        if whole and sorted(indices) != list(range(plan.length)):
            problems.append(f"epoch {epoch}: not each sample once: {_miscounted(indices)}")
        evaluated = _last(lives, "val", "epoch", epoch)
        counted = [i for batches in evaluated for share in batches for i in share.indices]
        if sorted(counted) != list(range(plan.val_length)):
            problems.append(f"evaluation of epoch {epoch}: {_miscounted(counted)}")
    return problems


def _last(
    lives: Sequence[Sequence[Sequence[Batch]]], kind: str, name: str, number: int
) -> list[list[Batch]]:
    """By rank, the batches of one step or epoch in the last life that has any of them."""
    for ranks in reversed(lives):
        found = [
            [b for b in batches if b.kind == kind and getattr(b, name) == number]
            for batches in ranks
        ]
        if any(found):
            return found
    return []


def _miscounted(indices: Sequence[int]) -> str:
    """How often each sample was taken that was not taken once."""
    counts = Counter(indices)
    more = {index: times for index, times in counts.items() if times != 1}
    return f"{len(indices)} samples, {len(counts)} different ones, more than once {more}"


def check_journal(plan: Plan, rows: Sequence[dict[str, Any]]) -> list[str]:
    """What is wrong with the lines of metrics.jsonl: each is there once and in order, evaluation is exact."""
    expected = []
    for step in range(1, plan.total_steps + 1):
        ends_epoch = step % plan.steps_per_epoch == 0 or step == plan.total_steps
        epoch = (step - 1) // plan.steps_per_epoch
        if step % plan.log_every == 0 or ends_epoch:
            expected.append((step, epoch, "train_loss"))
        if ends_epoch:
            expected.append((step, epoch, "val_loss"))
    found = [(r["step"], r["epoch"], "val_loss" if "val_loss" in r else "train_loss") for r in rows]
    problems = compare("lines of metrics.jsonl", expected, found)
    squares = [index**2 for index in range(plan.val_length)]
    for row in rows:
        if "val_loss" in row:
            means = row["val_index"], row["val_square"]
            exact = (plan.val_length - 1) / 2, sum(squares) / plan.val_length
            if any(abs(a - b) > 1e-9 * b for a, b in zip(means, exact, strict=True)):
                problems.append(f"means of an evaluation: {means}, expected {exact}")
    return problems


def same_bits(plan: Plan, expected: Path, actual: Path) -> list[str]:
    """Where a finished run is not to the bit the one that nobody killed, wall-clock figures aside."""
    runs = expected, actual
    problems = compare("files", *(sorted(p.name for p in run.iterdir()) for run in runs))
    for name in ("model.safetensors", "result.json"):
        problems += compare(name, *((run / name).read_bytes() for run in runs))
    problems += compare("metrics.jsonl", *map(journal, runs))
    checkpoints = [_last_checkpoint(run) for run in runs]
    if plan.parts is not None:
        for found in checkpoints:  # of rank 0, which has not computed the last part in each of them
            del found["training_state.pt"]["rng"]
        if len({found["training_state.pt"]["position"] for found in checkpoints}) > 1:
            # Asked to stop between its last step and the evaluation of that: a resume evaluates again, and a
            # checkpoint is never written twice.
            assert any(life.asks for life in plan.lives)
            for found in checkpoints:
                for name in ("training_state.pt", "meta"):
                    for key in ("epoch", "position", "metrics", "best", "planned"):
                        found[name].pop(key, None)
    return problems + compare("the last checkpoint", *checkpoints)


def same_numbers(plan: Plan, expected: Path, actual: Path) -> list[str]:
    """Where a finished run is not, to float tolerance, that of one process; dropout depends on the ranks."""
    one, many = map(_last_checkpoint, (expected, actual))
    states = [found["training_state.pt"] for found in (one, many)]
    problems = [
        text
        for name in ("step", "epoch", "position", "order_crc")
        for text in compare(name, *(state[name] for state in states))
    ]
    if plan.dropout:
        return problems
    pairs: dict[str, tuple[Any, Any]] = {"metrics.jsonl": (journal(actual), journal(expected))}
    for name in ("model.safetensors", "ema.safetensors"):
        pairs[name] = safetensors.torch.load(many[name]), safetensors.torch.load(one[name])
    for name, (found, wanted) in pairs.items():
        try:
            torch.testing.assert_close(found, wanted, rtol=2e-4, atol=5e-6)
        except AssertionError as error:
            problems.append(f"{name}: {error}")
    return problems


def _last_checkpoint(run: Path) -> dict[str, Any]:
    return checkpoint(checkpoint_folders(run / "checkpoints")[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--plans", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--parts",
        action="store_true",
        help="steps in parts: other numbers of ranks, and equal bits",
    )
    parser.add_argument("--only", type=int, help="carry out this plan alone, and keep its folder")
    parser.add_argument("--out", type=Path, help="append the line to this file as well")
    parser.add_argument(
        "--record", action="store_true", help="... to bench/results/elastic_plans.jsonl"
    )
    options = parser.parse_args()
    start = time.monotonic()
    numbers = range(options.plans) if options.only is None else [options.only]
    make = make_plan_in_parts if options.parts else make_plan
    plans = [make(number, options.seed) for number in numbers]
    outcomes = []
    for plan in plans:
        folder = Path(tempfile.mkdtemp(prefix=f"elastic_plan_{plan.number}_"))
        began = time.monotonic()
        try:
            outcomes.append(carry_out(plan, folder))
        except (RuntimeError, TimeoutError) as error:
            outcomes.append(Outcome(problems=[f"{error}"]))
        if options.only is not None or outcomes[-1].problems:
            print(f"{folder}: {plan}", *outcomes[-1].problems[:9], sep="\n", file=sys.stderr)
        else:
            shutil.rmtree(folder)
        print(f"plan {plan.number}: {time.monotonic() - began:.1f} s", file=sys.stderr)
    from provenance import commit, cpu_model  # beside this script

    kills = [kill for outcome in outcomes for kill in outcome.kills]
    problems = [
        f"plan {plan.number}: {problem}"
        for plan, outcome in zip(plans, outcomes, strict=True)
        for problem in outcome.problems
    ]
    text = json.dumps({
        "contender": "elastic_plans", "good": not problems, "plans": len(plans),
        "exact_plans": sum(plan.bits_count for plan in plans), "in_parts": options.parts, "kills": len(kills),
        "kills_in_saves": sum(kill.in_save for kill in kills),
        "kills_in_mid_epoch": sum(kill.in_mid_epoch for kill in kills),
        "kills_of_one_rank": sum(kill.life.victim is not None for kill in kills),
        "by_sigterm": sum(kill.life.asks for kill in kills),
        "kills_at": dict(sorted(Counter(kill.life.end for kill in kills).items())),
        "lives_by_ranks": dict(sorted(Counter(life.world for p in plans for life in p.lives).items())),
        "steps": sum(plan.total_steps for plan in plans), "seed": options.seed,
        "problems": problems[:20], "seconds": round(time.monotonic() - start, 1),
        "torch": torch.__version__, "python": platform.python_version(), "cpu": cpu_model(),
        "commit": commit(), "command": " ".join(["python", "bench/elastic_plans.py", *sys.argv[1:]]),
    })  # fmt: skip
    print(text)
    results = Path(__file__).parent / "results" / "elastic_plans.jsonl"
    for path in [p for p in (options.out, results if options.record else None) if p is not None]:
        with path.open("a") as file:
            file.write(text + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
