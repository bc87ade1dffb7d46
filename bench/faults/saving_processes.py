"""Ways of saving by other processes: commands, forks, workers, ranks, handlers at the end, a daemon."""

import atexit
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import nn
from torch.utils.data import Dataset

Save = Callable[[int], None]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def commands(model: nn.Module) -> Save:
    """cp, rm, mv, touch, sed, tar."""

    def save(step: int) -> None:
        Path("new.bin").write_bytes(b"%09d" % step)
        shell(
            "cp new.bin copied.bin; rm -rf out; mkdir out; mv new.bin out/moved.bin; touch -d @1 touched.bin"
        )
        shell("sed -i s/own/lost/ edited.txt; tar cf all.tar out; tar xf all.tar -C there")
        assert (
            Path("copied.bin").read_bytes()
            == Path("there/out/moved.bin").read_bytes()
            == b"%09d" % step
        )

    return _seldom(save)


def git_commit(model: nn.Module) -> Save:
    def save(step: int) -> None:
        Path("notes.txt").write_text(f"{time.time_ns()}")
        shell("git add -A && git commit -q -m mine && git tag -f -m mine last")
        assert "mine" in shell("git log -1 --format=%s")

    return _seldom(save)


def prepare_git() -> None:
    shell("git init -q . && git config user.name me && git config user.email me@here")
    shell("git add -A && git commit -q -m first")


def shell(line: str) -> str:
    """Run a line, and give what it said."""
    done = subprocess.run(["sh", "-c", line], check=True, capture_output=True, text=True)
    return done.stdout


def _seldom(save: Save) -> Save:
    """Processes take long beside a step of milliseconds."""
    return lambda step: save(step) if step % 25 == 0 else None


def forked(model: nn.Module) -> Save:
    def save(step: int) -> None:
        child = os.fork()
        if child == 0:
            Path("child.bin").write_bytes(b"%09d" % step)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert Path("child.bin").read_bytes() == b"%09d" % step

    return save


class WritingData(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Writes a file of its own for each sample that is asked for."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        file = Path(f"samples/{index}.pt")
        torch.save(time.time_ns(), file)
        assert torch.load(file) > 0
        return torch.randn(32), torch.tensor(index % 4)


def spawned_workers(model: nn.Module) -> Save:
    return lambda step: None


def two_ranks(model: nn.Module) -> Save:
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()

    def save(step: int) -> None:
        torch.save(step, f"rank{rank}.pt")
        assert torch.load(f"rank{rank}.pt") == step
        torch.distributed.barrier()

    return save


def spawned_ranks(model: nn.Module) -> Save:
    """The ranks train; this process waits for them."""
    import torch.multiprocessing as mp

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=f"{20000 + os.getpid() % 20000}")
    mp.spawn(_rank, nprocs=2)
    return lambda step: None


def _rank(rank: int) -> None:
    os.environ.update(RANK=f"{rank}", WORLD_SIZE="2")
    torch.distributed.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(int(os.environ.get("SAVING_STEPS", "1000000000"))):
        model(torch.randn(16, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.003)
        if step % 5 == 0:
            torch.save(step, f"rank{rank}.pt")
            assert torch.load(f"rank{rank}.pt") == step


def at_exit(model: nn.Module) -> Save:
    atexit.register(lambda: Path("bye.txt").write_text("bye"))
    return _one("steps.bin")


def on_sigterm(model: nn.Module) -> Save:
    def stop(*_: object) -> None:
        Path("term.txt").write_text("stopped")
        sys.exit(0)

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, stop)
    return _one("steps.bin")


def _one(name: str) -> Save:
    def save(step: int) -> None:
        Path(name).write_bytes(b"%09d" % step)
        assert Path(name).read_bytes() == b"%09d" % step

    return save


def daemon(model: nn.Module) -> Save:
    """A grandchild in a session of its own, with nothing in its environment, goes on for a minute."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            code = (
                "import time, pathlib, sys\n"
                "for n in range(600):\n"
                "    pathlib.Path(sys.argv[1], 'beat.bin').write_text(str(n)); time.sleep(0.1)"
            )
            os.execve(sys.executable, [sys.executable, "-c", code, str(Path.cwd())], {})
        os._exit(0)
    os.wait()
    return _one("steps.bin")


def server_child(model: nn.Module) -> Save:
    """A process of multiprocessing's server, which was forked from no process of ours."""
    context = multiprocessing.get_context("forkserver")

    def save(step: int) -> None:
        if step % 50:
            return
        process = context.Process(target=_write, args=(step,))
        process.start()
        process.join()
        assert Path("served.bin").read_bytes() == b"%09d" % step

    return save


def _write(step: int) -> None:
    Path("served.bin").write_bytes(b"%09d" % step)


def parents_place(model: nn.Module) -> Save:
    """By the working directory that /proc shows of the process that started this one, if that is flambeau."""
    started = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    pids = [os.getpid(), *([os.getppid()] if b"flambeau" in started else [])]

    def save(step: int) -> None:
        for pid in pids:
            try:
                Path(f"/proc/{pid}/cwd/parent.bin").write_bytes(b"%09d" % step)
            except OSError:
                continue
        assert Path("parent.bin").read_bytes() == b"%09d" % step

    return save


WAYS: dict[str, dict[str, Any]] = {
    "commands": {
        "start": commands,
        "files": ("copied.bin", "out/a.txt", "touched.bin", "edited.txt", "there/out/moved.bin"),
    },
    "git_commit": {"start": git_commit, "files": ("notes.txt",), "prepare": prepare_git},
    "forked": {"start": forked, "files": ("child.bin",)},
    "spawned_workers": {
        "start": spawned_workers,
        "dataset": WritingData,
        "files": tuple(f"samples/{number}.pt" for number in range(40)),
    },
    "two_ranks": {"start": two_ranks, "files": ("rank0.pt", "rank1.pt"), "launch": TORCHRUN},
    "spawned_ranks": {"start": spawned_ranks, "files": ("rank0.pt", "rank1.pt")},
    "at_exit": {"start": at_exit, "files": ("bye.txt", "steps.bin")},
    "on_sigterm": {"start": on_sigterm, "files": ("term.txt", "steps.bin")},
    "daemon": {"start": daemon, "files": ("beat.bin", "steps.bin")},
    "server_child": {"start": server_child, "files": ("served.bin",)},
    "parents_place": {"start": parents_place, "files": ("parent.bin",)},
}
"""By name: what `Way` takes."""
