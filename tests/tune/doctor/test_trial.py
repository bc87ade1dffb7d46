"""Real scripts, watched: what they lose their time to is found, and nothing of them is left or lost."""

import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from flambeau.errors import InputError
from flambeau.sandbox.sandbox import Sandbox
from flambeau.sandbox.trial_processes import processes_of
from flambeau.tune.doctor.causes import findings_of
from flambeau.tune.doctor.remedies import remedies_for
from flambeau.tune.doctor.shares import mean_shares
from flambeau.tune.doctor.trial import Script, Trial
from flambeau.tune.watch.plan import Plan

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")

SHORT: dict[str, Any] = {
    "watches": False,
    "warmup_steps": 12,
    "warmup_s": 0.1,
    "steps": 8,
    "seconds": 0.5,
}
QUICK = Plan(warmup_steps=3, warmup_s=0.1, steps=8, seconds=0.7)
SCRIPT = """
import sys, time, weakref, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
class Slow(Dataset):
    def __len__(self):
        return 100_000
    def __getitem__(self, index):
        time.sleep(0.004)
        return torch.randn(8), index % 3
def main():
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = iter(DataLoader(Slow(), batch_size=4, num_workers=int(sys.argv[1])))
    batches.mine = weakref.ref(batches)  # as scripts may, and flambeau's own workers do
    for x, y in batches:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.save(model.state_dict(), "last.pt")
        torch.save(model.state_dict(), "new.pt")
if __name__ == "__main__":
    main()
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    return file


def run(
    *words: object, plan: Plan = QUICK, limit_s: float = 120, told: list[str] | None = None
) -> Trial:
    """A trial; `told` takes what the script has written into the trial's folder as `told`."""

    def read(folder: Path) -> None:
        if told is not None:
            told.append((folder / "told").read_text())

    with Sandbox() as sandbox:
        script = Script([sys.executable, *map(str, words)], sandbox, limit_s)
        return script.run(plan, before_removal=read)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_slow_data_set_is_found_by_its_line(script: Path, workers: int) -> None:
    torch.save({"mine": torch.ones(1)}, "last.pt")
    trial = run(script, workers)
    assert trial.failure is None
    (trainer,) = trial.trainers
    assert trainer["steps"] >= 8 and trainer["loader"]["num_workers"] == workers
    assert mean_shares(trial)["data"] > 0.5
    cause = findings_of(trial).causes[0]
    assert (cause.kind, cause.where) == ("transform", f"{script}:9")
    # What was there is as it was, and what the trial has saved is gone.
    assert torch.load("last.pt", weights_only=True)["mine"].item() == 1
    assert sorted(file.name for file in script.parent.iterdir()) == ["last.pt", "train.py"]


def test_a_copy_of_the_folder_is_told_by_the_users_own_paths(script: Path) -> None:
    with Sandbox("copy") as sandbox:
        watched = Script([sys.executable, f"{script}", "0"], sandbox, 120)
        trial = watched.run(QUICK)
        assert trial.failure is None
        cause = findings_of(trial).causes[0]
        assert (cause.kind, cause.where) == ("transform", f"{script}:9")
        script.write_text(f"raise ValueError({str(script.parent)!r} + '/mine.csv is empty')")
        failed = watched.run(QUICK).failure
    assert failed is not None
    assert f'File "{script}", line 1' in failed and f"{script.parent}/mine.csv is empty" in failed
    assert "flambeau-trials" not in failed


SHORT_STEPS = """
import os, time, torch
from pathlib import Path
from torch import nn
torch.set_num_threads(1)
model = nn.Linear(8, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(4, 8)
own, began = 0.0, time.thread_time()
for step in range(10_000_000):
    model(x).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    then = time.thread_time()
    for number in range(4000):
        pass
    own += time.thread_time() - then
    if step % 100 == 99:
        folder = Path(os.environ["FLAMBEAU_TRIAL"])
        (folder / "new").write_text(f"{own / (time.thread_time() - began)}")
        (folder / "new").replace(folder / "told")
"""


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel does not tell")
def test_short_pieces_of_python_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "train.py"
    file.write_text(SHORT_STEPS)
    told: list[str] = []
    plan = Plan(warmup_steps=3, warmup_s=0.3, steps=8, seconds=3.0)
    trial = run(file, plan=plan, told=told)
    assert mean_shares(trial)["python"] == pytest.approx(float(told[0]), abs=0.25)


TINY_STEPS = """
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
torch.set_num_threads(1)
class Ready(Dataset):
    x = torch.randn(4, 8)
    def __len__(self):
        return 1000
    def __getitem__(self, index):
        return self.x
model = nn.Linear(8, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer.register_step_post_hook(lambda *_: None)  # which torch goes through with the watch's
while True:
    for x in DataLoader(Ready(), batch_size=None):
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_of_very_short_steps_a_fifth_is_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "train.py"
    file.write_text(TINY_STEPS)
    plan = Plan(warmup_steps=100, warmup_s=0.5, steps=8, seconds=3.0, short_s=1.0)
    trial = run(file, plan=plan)
    assert trial.failure is None
    (trainer,) = trial.trainers
    assert 0.9 < trainer["seconds"] < 2.5  # of six
    assert trainer["steps"] == trainer["batches"]
    assert trainer["step_s"] == pytest.approx(trainer["seconds"] / trainer["steps"])
    assert len(trainer["times"]) == min(trainer["steps"], 10_000)
    assert max(trainer["times"]) < 0.5  # no pause is a step
    seen = sum(row[-1] for row in trainer["seen"] if row[0] == "main")
    assert 0.3 * trainer["seconds"] < seen < 1.2 * trainer["seconds"]
    shares = mean_shares(trial)
    assert shares["data"] > 0.02 and shares["backward"] > 0.1


LOADED_ONCE = """
import time, torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
torch.set_num_threads(1)
class TwoSeconds(IterableDataset):
    def __iter__(self):
        began = time.monotonic()
        while time.monotonic() - began < 2:
            yield torch.ones(4, 8)
def batches():
    yield from DataLoader(TwoSeconds(), batch_size=None)
    while True:
        yield torch.ones(4, 8)
model = nn.Linear(8, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in batches():
    model(x).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_loader_that_ends_while_nothing_is_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of data that are read once and kept: the watch would wait for the next batch for ever."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "train.py"
    file.write_text(LOADED_ONCE)
    plan = Plan(warmup_steps=100, warmup_s=0.5, steps=8, seconds=2.0, short_s=1.0)
    trial = run(file, plan=plan, limit_s=40)
    assert trial.failure is None
    assert trial.trainers[0]["seconds"] > 0.9  # a slice of batches, and others without


GRADIENTS = """
import sys, torch
from torch import nn
keeps, is_last = sys.argv[1:] == ["keeps"], sys.argv[1:] == ["last"]
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.AdaptiveMaxPool2d(1), nn.Flatten())
if is_last:
    model.to(memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    model(torch.randn(8, 3, 32, 32)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=not keeps)
"""


@pytest.mark.parametrize("how", ["keeps", "last"])
def test_what_is_set_already_is_not_proposed(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backward pass of a pooling fills with zeros, too, as gradients are that are not dropped."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "train.py"
    file.write_text(GRADIENTS)
    proposed = {one.name for one in remedies_for(findings_of(run(file, how)))}
    assert ("set_to_none" in proposed) is (how == "keeps")
    assert ("channels_last" in proposed) is (how != "last")


def test_a_change_is_made_and_the_script_does_not_know(script: Path) -> None:
    plain = run(script, 0, plan=Plan(**SHORT))
    cached = run(script, 0, plan=Plan(**SHORT, change={"cached": 4}))
    assert cached.trainers[0]["waited_s"] < plain.trainers[0]["waited_s"] / 10
    one_worker = run(script, 0, plan=Plan(**SHORT, change={"workers": 1}))
    assert one_worker.trainers[0]["loader"]["num_workers"] == 1


def test_the_loader_alone(script: Path) -> None:
    trial = run(script, 0, plan=Plan(**SHORT, change={"alone": 0.5}))
    assert trial.alone_per_s is not None
    assert 5 < trial.alone_per_s < 1000 / 16  # four samples of 4 ms, at least


def test_a_trial_that_takes_all_memory_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "script.py"
    file.write_text("held = bytearray(300 << 20)\nimport time; time.sleep(100)")
    monkeypatch.setattr("flambeau.tune.doctor.machine_watch.usable_memory", lambda: 200 << 20)
    trial = run(file, limit_s=300)
    assert trial.failure is not None
    assert "of 0.2 GiB of memory were in use" in trial.failure


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "raise SystemExit('no such data')",
            "ended with code 1 before its first step.*no such data",
        ),
        ("import torch; print('done')", "ended with code 0 before its first step.*done"),
        ("", "ended with code 0 before its first step of an optimizer, and said nothing"),
    ],
)
def test_a_script_that_makes_no_step(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "script.py"
    file.write_text(text)
    trial = run(file)
    assert trial.failure is not None and not trial.trainers
    assert re.search(message, trial.failure.replace("\n", " "))


def test_of_a_flood_of_output_the_end_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_text(
        "import sys\n"
        "for number in range(300):\n    print('x' * 1_000_000)\n"
        "print('a line\\n' * 50 + 'the reason ' + 'y' * 1000)\nsys.exit(3)"
    )
    trial = run(file)
    assert trial.failure is not None and len(trial.failure) < 1500
    assert "with code 3" in trial.failure
    assert trial.failure.count("a line") == 11 and "the reason yyy" in trial.failure
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4 << 20  # KiB; of 300 MB and torch


RUN = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from flambeau import Run
model = nn.Linear(8, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
told = []
run = Run("mine", model, optimizer, TensorDataset(torch.randn(64, 8), torch.randint(3, (64,))),
          duration="{duration}", batch_size=8, track=[lambda step, figures: told.append(step)])
for epoch in run.epochs():
    for x, y in run.batches():
        run.step(nn.functional.cross_entropy(model(x), y))
assert not told
"""


def test_a_run_of_the_user_is_not_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finished one would make no step, and one under way would go on."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "script.py"
    file.write_text(RUN.replace("{duration}", "3st").replace("assert not told", ""))
    subprocess.run([sys.executable, file], check=True, capture_output=True)
    before = {path: path.stat().st_mtime_ns for path in sorted(tmp_path.rglob("*"))}
    file.write_text(RUN.replace("{duration}", "100000st"))
    before[file] = file.stat().st_mtime_ns
    trial = run(file)
    assert trial.failure is None and trial.trainers[0]["steps"] >= 8
    assert {path: path.stat().st_mtime_ns for path in sorted(tmp_path.rglob("*"))} == before


def test_whom_a_script_talks_to_is_seen(tmp_path: Path) -> None:
    """A database of this machine; the second connection has both ends in the script itself."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        file = tmp_path / "script.py"
        file.write_text(
            "import socket, time\n"
            f"one = socket.create_connection(('127.0.0.1', {server.getsockname()[1]}))\n"
            "own = socket.create_server(('127.0.0.1', 0))\n"
            "two = socket.create_connection(own.getsockname())\nthree = own.accept()\ntime.sleep(1.5)"
        )
        trial = run(file)
        assert trial.machine is not None
        assert trial.machine.peers == {f"127.0.0.1:{server.getsockname()[1]}"}


STEPS = """
import sys, torch
weight = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD([weight], lr=0.1)
for _ in range(4):
    weight.square().sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("end", "message"),
    [
        ("", "the script ended after 4 steps, too few to time them: let it train longer"),
        ("sys.exit('no disk')", "ended with code 1 before enough steps.*no disk"),
    ],
)
def test_a_script_of_few_steps(tmp_path: Path, end: str, message: str) -> None:
    file = tmp_path / "script.py"
    file.write_text(STEPS + end)
    trial = run(file)
    assert trial.failure is not None and not trial.trainers
    assert re.fullmatch(f".*{message}.*", trial.failure.replace("\n", " "))


def test_a_script_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_text(
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], "
        "start_new_session=True)\n"
        "open(os.environ['FLAMBEAU_TRIAL'] + '/told', 'w').write(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    told: list[str] = []
    trial = run(file, limit_s=3, told=told)
    ended = "the script was ended after 3 s (--limit): it made no step of an optimizer"
    assert trial.failure is not None and trial.failure.startswith(ended)
    child = int(told[0])
    with pytest.raises(ProcessLookupError):
        for _ in range(100):
            os.kill(child, 0)
            time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_doctor_that_is_ended_ends_the_script(tmp_path: Path, number: signal.Signals) -> None:
    file = tmp_path / "script.py"
    file.write_text(
        "import os, time\n"
        "with open(os.environ['FLAMBEAU_TRIAL'] + '/new', 'w') as file:\n"
        "    file.write(str(os.getpid()))\n"
        "os.rename(file.name, file.name.replace('new', 'pid'))\n"
        "time.sleep(300)"
    )
    doctor = subprocess.Popen(
        [sys.executable, "-m", "flambeau", "doctor", "--", sys.executable, f"{file}"],
        stderr=subprocess.DEVNULL, env=os.environ | {"TMPDIR": f"{tmp_path}"},
    )  # fmt: skip
    try:
        while not (found := list(tmp_path.glob("flambeau-trials-*/trial-*/pid"))):
            assert doctor.poll() is None
            time.sleep(0.05)
        script = Path(f"/proc/{found[0].read_text()}")
        doctor.send_signal(number)
        assert doctor.wait(300) == 128 + number
    finally:
        doctor.kill()
    with suppress(FileNotFoundError, ProcessLookupError):
        assert "\nState:\tZ" in (script / "status").read_text()
    assert not list(tmp_path.glob("flambeau-trials-*"))


def test_a_command_that_does_not_exist() -> None:
    with Sandbox() as sandbox, pytest.raises(InputError, match="no-such-program: no such program"):
        Script(["no-such-program"], sandbox, 5).run(QUICK)


def test_marked_processes_are_found(tmp_path: Path) -> None:
    environment = {**os.environ, "FLAMBEAU_TRIAL": f"{tmp_path}", "PYTHONPATH": ""}
    child = subprocess.Popen(
        [sys.executable, "-c", "input()"], env=environment, stdin=subprocess.PIPE
    )
    try:
        deadline = time.monotonic() + 300
        while child.pid not in list(processes_of(tmp_path)):
            assert time.monotonic() < deadline
        assert os.getpid() not in list(processes_of(tmp_path))
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate()
