"""`flambeau launch` as a command, and torchrun: what a user types, with real processes all the way down."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from flambeau.parallel.launcher.job_spec import JobSpec

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="ranks are tied to the launcher by prctl"
)

OLD_SCRIPT = """
import argparse, os, pathlib, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
parser.add_argument("--lr", type=float)
arguments = parser.parse_args()
assert arguments.local_rank == int(os.environ["LOCAL_RANK"])
os.write(1, f"rank {os.environ['RANK']} lr {arguments.lr}\\n".encode())
pathlib.Path(f"said-{arguments.local_rank}").touch()
while not pathlib.Path("said-0").exists():  # the end of rank 1 ends rank 0
    time.sleep(0.01)
sys.exit(3 * arguments.local_rank)
"""
PLAIN_SCRIPT = """
import os, socket, sys
socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))).close()
names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
os.write(1, (" ".join(os.environ[name] for name in names) + f" {sys.argv[1:]}\\n").encode())
"""
WAITING_SCRIPT = """
import os, pathlib, time
pathlib.Path("ready-" + os.environ["RANK"]).touch()
time.sleep(60)
"""
LAUNCH = ["-m", "flambeau", "launch"]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def until_held(port: int) -> None:
    """Until somebody listens there."""
    deadline = time.monotonic() + 60
    while True:
        with contextlib.suppress(OSError):
            socket.create_connection(("localhost", port)).close()
            return
        assert time.monotonic() < deadline
        time.sleep(0.05)


Done = dict[str, tuple[int, list[str], str]]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, forked_python: Any) -> Done:
    """Exit code, sorted output and errors of each command."""
    folder = tmp_path_factory.mktemp("launch")
    for name, text in (("old", OLD_SCRIPT), ("plain", PLAIN_SCRIPT), ("waiting", WAITING_SCRIPT)):
        (folder / f"{name}.py").write_text(text)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    port = free_port()
    nodes = ["--nnodes", "2", "--rdzv", f"localhost:{port}"]
    commands = {
        "old": [*LAUNCH, "--procs", "2", "--local-rank", "--", "old.py", "--lr", "0.1"],
        "torchrun": [*torchrun, "plain.py", "--flag"],
        "holder": [*LAUNCH, *nodes, "--node-rank=0", "--procs=1", "--", "waiting.py"],
        "other": [*LAUNCH, *nodes, "--node-rank=1", "--procs=1", "--", "-m", "waiting"],
    }
    environ = {
        k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "TORCH_CPP_LOG_LEVEL")
    }
    environ["TMPDIR"] = str(folder)  # where one that is killed leaves its error files
    processes: dict[str, Any] = {}
    try:
        with contextlib.chdir(folder):
            for name, words in commands.items():
                out, err = (folder / f"{name}.{kind}" for kind in ("out", "err"))
                out.touch()
                err.touch()
                if name != "other":
                    processes[name] = forked_python(words, output=out, errors=err, environ=environ)
                    continue
                until_held(port)  # or this one would hold it
                # A new Python: torch's C++ code is told to be quiet before it is loaded.
                with out.open("w") as stdout, err.open("w") as stderr:
                    processes[name] = subprocess.Popen(
                        [sys.executable, *words], env=environ, stdout=stdout, stderr=stderr
                    )
        deadline = time.monotonic() + 60
        while not all((folder / f"ready-{rank}").exists() for rank in range(2)):
            assert time.monotonic() < deadline, [f.read_text() for f in folder.glob("*.err")]
            time.sleep(0.05)
        processes["holder"].kill()
        codes = {name: process.wait(60) for name, process in processes.items()}
    finally:
        for process in processes.values():
            process.kill()
    said = {path.name: path.read_text() for path in folder.glob("*.*")}
    return {
        name: (code, sorted(said[f"{name}.out"].splitlines()), said[f"{name}.err"])
        for name, code in codes.items()
    }


def test_a_script_of_the_old_launcher_runs(done: Done) -> None:
    code, out, err = done["old"]
    assert out == ["rank 0 lr 0.1", "rank 1 lr 0.1"]
    assert code == 1
    host = re.escape(socket.gethostname())
    line = rf"flambeau: rank 1 of 2 \(host {host}, process \d+\) ended with exit code 3\n"
    assert re.fullmatch(line, err)


def test_torchrun_runs_a_plain_script(done: Done) -> None:
    code, out, _ = done["torchrun"]
    assert (code, out) == (0, ["0 2 0 2 ['--flag']", "1 2 1 2 ['--flag']"])


def test_a_launcher_that_is_gone_is_one_line_for_the_others(done: Done) -> None:
    """Torch's C++ code has a traceback for that, of 20 lines."""
    code, _, err = done["other"]
    assert code == 1
    assert re.fullmatch(r"flambeau: lost the node that holds the rendezvous, localhost:\d+\n", err)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "nothing to run"),
        ("--", "nothing to run"),
        ("-- trian", "'trian' is neither a script nor a command; did you mean 'train'?"),
        ("-- no/such.py", "'no/such.py' is neither a script nor a command"),
        ("-- .", "'.' is neither a script nor a command"),
        ("-- evaluate run data", "evaluate takes one process"),
        ("-- launch -- train", "launch takes one process"),
        ("-- train --epocs 3", "unknown flag --epocs; did you mean '--epochs'?"),
        ("-- train a b", "unexpected argument 'b'"),
        ("-- train --procs 2", "put it before the --"),
        ("train --procs=2", "put it before the --"),
        ("--procz 2 -- train", "unknown flag --procz; did you mean '--procs'?"),
        ("--procs 0 -- train", "--procs must be a number above 0, or auto; got '0'"),
        ("--procs 100000 -- train", "100000 processes are too many for this machine, which has"),
        (f"--procs {'9' * 5000} -- train", "--procs must be a number above 0, or auto; got '999"),
        ("--procs -1 -- train", "--procs"),
        ("--procs two -- train", "got 'two'"),
        ("--procs 1 --nnodes 2 -- train", "--rdzv HOST:PORT"),
        ("--procs 1 --nnodes two -- train", "got 'two'"),
        ("--procs 1 --nnodes 1: -- train", "got '1:'"),
        ("--procs 1 --nnodes 2:1 --rdzv a:1 -- train", "got 2:1"),
        ("--procs 1 --nnodes 2 --rdzv no-such-host.invalid:1 -- train", "no-such-host.invalid"),
        ("--procs 1 --node-rank one -- train", "--node-rank"),
        ("--procs 1 --max-restarts=-1 -- train", "got -1"),
        ("--procs 1 --join-timeout 0 -- train", "got 0"),
        ("--procs", "--procs"),
    ],
)
def test_a_wrong_command_line_is_named(
    words: str, message: str, flambeau: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def go_too_far(*_: Any, **__: Any) -> int:
        raise AssertionError("ranks would have been started")

    monkeypatch.setattr("flambeau.parallel.launcher.job.Job.run", go_too_far)
    code, out, err = flambeau("launch", words)
    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith("flambeau: ")
    assert len(err.splitlines()) == 1


def test_the_help_of_what_is_launched_is_that_of_the_verb(flambeau: Any) -> None:
    assert flambeau("launch -- train --help") == flambeau("train --help")


def test_what_follows_belongs_to_the_script(
    flambeau: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """With `--` before it or without, and also what looks like a flag of launch."""
    found = []

    def note(spec: JobSpec, **settings: Any) -> int:
        found.append((spec.command[1:], spec.procs, spec.nodes, spec.join_timeout_s))
        return 75

    monkeypatch.setattr("flambeau.parallel.launcher.launch.launch", note)
    monkeypatch.setattr("flambeau.parallel.launcher.launch.auto_procs", lambda: 8)
    monkeypatch.chdir(tmp_path)
    Path("my.py").touch()
    rest = "my.py --procs 3 -- --help"
    for words in (f"--procs 2 -- {rest}", f"--procs 2 {rest}"):
        assert flambeau("launch", words).code == 75
    assert found == [(["my.py", "--procs", "3", "--", "--help"], 2, (1, 1), 600)] * 2
    found.clear()
    flambeau("launch --nnodes 2:3 --join-timeout 7 --local-rank -- my.py a")
    flambeau("launch --local-rank -- -m pack.mod a")
    flambeau("launch -- train photos --lr 0.1")
    number = "--local_rank=${local_rank}"
    assert found == [
        (["my.py", number, "a"], 8, (2, 3), 7),
        (["-m", "pack.mod", number, "a"], 8, (1, 1), 600),
        (["-m", "flambeau", "train", "photos", "--lr", "0.1"], 8, (1, 1), 600),
    ]


def test_a_ctrl_c_while_torch_is_loaded(tmp_path: Path) -> None:
    """The launcher's own seconds: there are no ranks yet."""
    script = tmp_path / "script.py"
    script.touch()
    process = subprocess.Popen(
        [sys.executable, *LAUNCH, "--procs", "1", "--", str(script)],
        text=True,
        stderr=subprocess.PIPE,
    )
    status = Path(f"/proc/{process.pid}/status")
    # It catches SIGTERM from before torch is imported; SIGINT is Python's from the start.
    while (
        not int(re.findall(r"^SigCgt:\s*(\w+)", status.read_text(), re.MULTILINE)[0], 16) >> 14 & 1
    ):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (130, "flambeau: interrupted\n")
