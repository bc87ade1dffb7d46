"""Stacks read from outside: C code has its own line, workers their own rows, and evaluations are known."""

import sys
from pathlib import Path
from typing import Any

import pytest

from flambeau.sandbox.sandbox import Sandbox
from flambeau.tune.doctor import outside_sampler
from flambeau.tune.doctor.outside_sampler import OutsideSampler, rows_of_stacks, why_not
from flambeau.tune.doctor.script_statements import evaluation_lines
from flambeau.tune.doctor.shares import by_line, data_work, rows_of, shares_of
from flambeau.tune.doctor.trial import Script, Trial
from flambeau.tune.watch.plan import Plan
from flambeau.tune.watch.ptrace_permission import SHORT

SITE = "/env/lib/python3.11/site-packages"
TRAINER: dict[str, Any] = {
    "process": 7,
    "thread": 7,
    "seconds": 4.0,
    "steps": 9,
    "batches": 9,
    "training_lines": [["/me/a.py", 9, "test"], ["/me/a.py", 20, "<module>"]],
    "evaluations": [],
}


def stacks(*lines: str) -> str:
    return "\n".join(lines)


def test_lines_of_threads_and_processes() -> None:
    own = 'process 7:"python -c a;b(c) 3"'
    worker = f'{own};process 8:"python -c x; y"'
    loop = f"_worker_loop ({SITE}/torch/utils/data/_utils/worker.py:300)"
    text = stacks(
        f"{own};thread (7): MainThread;<module> (/me/a.py:20);test (/me/a.py:8) 3",
        f"{own};thread (7): MainThread;<module> (/me/a.py:20);"
        f"Tensor.backward ({SITE}/torch/_tensor.py:5) 1",
        f"{own};thread (7): MainThread;wait_for ({SITE}/flambeau/tune/watch/ptrace_permission.py:30) 9",
        f"{own};thread (99): Other;run (/me/b.py:1) 4",
        f"{worker};thread (8): MainThread;{loop};Data.__getitem__ (/me/d.py:4) 2",
        f'{own};process 9:"sleep";thread (9): MainThread;main (/me/e.py:1) 4',
        "py-spy> a line of another kind",
    )
    rows = rows_of_stacks(text, TRAINER)
    assert sorted(rows[7], key=str) == [
        ["main", "", "", "", "/me/a.py", 8, "test", 3.0],  # a quarter of 4 s per stack
        ["main", "backward", "", "", "/me/a.py", 20, "<module>", 1.0],
    ]
    assert rows[8] == [["main", "worker", "", "", "/me/d.py", 4, "__getitem__", 2.0]]
    assert rows.keys() == {7, 8}
    assert rows_of_stacks("", TRAINER) == {}


def test_a_thread_of_the_script_that_computes() -> None:
    """One that hardly runs, such as a logger, and threads of libraries are left out."""
    own = 'process 7:"python"'
    text = stacks(
        f"{own};thread (7): MainThread;<module> (/me/a.py:20) 4",
        f"{own};thread (8): Poll;run (/me/b.py:1);wait (/me/b.py:5) 3",
        f"{own};thread (9): Log;run (/me/c.py:1) 4",
        f"{own};thread (10): Other;run ({SITE}/lib/d.py:1) 4",
    )
    rows = rows_of_stacks(text, TRAINER | {"runs": [[7, 0.5], [8, 0.9], [9, 0.01], [10, 1.0]]})
    assert [row for row in rows[7] if row[0] != "main"] == [
        ["companion8", "", "", "", "/me/b.py", 5, "wait", 3.0]
    ]


PRODUCER = """\
def work(self):
    while True:
        self.ready.put(
            decoded(next(paths)))

def log():
    while True:
        sleep(1)
"""


def test_a_thread_of_the_script_that_makes_batches(tmp_path: Path) -> None:
    """One that puts nothing into a queue, such as a logger, makes none."""
    file = tmp_path / "a.py"
    file.write_text(PRODUCER)
    own = 'process 7:"python"'
    run = "run (/usr/lib/python3.11/threading.py:982)"
    rows = rows_of_stacks(
        stacks(
            f"{own};thread (7): MainThread;<module> (/me/a.py:20);get (/usr/lib/python3.11/queue.py:9);"
            "wait (/usr/lib/python3.11/threading.py:5) 3",
            f"{own};thread (7): MainThread;<module> (/me/a.py:21) 1",
            f"{own};thread (8): Thread-1;{run};work ({file}:4);load ({SITE}/PIL/ImageFile.py:5) 3",
            f"{own};thread (8): Thread-1;{run};work ({file}:3);put (/usr/lib/python3.11/queue.py:9);"
            "wait (/usr/lib/python3.11/threading.py:5) 1",
            f"{own};thread (9): Thread-2;{run};log ({file}:8) 4",
        ),
        TRAINER,
    )
    made = [row for row in rows[7] if row[0] == "producer"]
    assert sorted(row[1:3] + row[4:6] + row[7:] for row in made) == [
        ["data", "decode", f"{file}", 4, 3.0],
        ["data", "idle", f"{file}", 3, 1.0],
    ]
    trainer = TRAINER | {
        "seen": rows[7],
        "batches": 0,
        "waited_s": 0.0,
        "started_s": 0.0,
    }
    assert shares_of(trainer)["data"] == 0.75
    work = data_work(Trial([trainer], []))
    assert work.shares == {"decode": 1.0} and work.lines["decode"] == [(f"{file}:4", 1.0)]


OWN_LOADER = """\
def batches():
    while True:
        yield shrunk(images)

for x in (
    batches()
):
    for p in net.parameters():
        seen.add(name(p))
    step(x)
    y = next(more)
"""


@pytest.mark.parametrize(("clocked", "phase"), [(0, "data"), (9, "")])
def test_batches_of_a_generator_of_the_script_are_data(
    clocked: int, phase: str, tmp_path: Path
) -> None:
    """Where there is no DataLoader, whose time is clocked."""
    file = tmp_path / "a.py"
    file.write_text(OWN_LOADER)
    lines = {f"<module> ({file}:{at});inner (/me/b.py:{at})": at for at in (5, 6, 8, 9, 11)}
    text = stacks(*(f"thread (7): MainThread;{one} 1" for one in lines))
    trainer = TRAINER | {"training_lines": [[f"{file}", 10, "<module>"]], "batches": clocked}
    phases = {row[5]: row[1] for row in rows_of_stacks(text, trainer)[7]}
    assert phases == {5: phase, 6: phase, 8: "", 9: "", 11: phase}


NO_LOADER = """\
def accuracy(net):
    net.eval()
    with torch.no_grad():
        guesses = net(held_inputs)
    return count(guesses)

def train(net, teacher):
    for x in inputs:
        with torch.no_grad():
            y = teacher(x)
        step(net(x), y)
        net.eval()
        with torch.inference_mode():
            shown = net(held_inputs)

def distill(teacher):
    with torch.no_grad():
        return teacher(x)
"""


def test_an_evaluation_without_a_loader(tmp_path: Path) -> None:
    """A function with eval() and without gradients; of one that trains only such blocks, after eval()."""
    file = tmp_path / "a.py"
    file.write_text(NO_LOADER)
    call = f"_call_impl ({SITE}/torch/nn/modules/module.py:9)"
    text = stacks(
        *(f"thread (7): MainThread;f ({file}:{at});{call} 1" for at in (4, 5, 10, 11, 14, 18))
    )
    trainer = TRAINER | {"training_lines": [[f"{file}", 11, "train"]]}
    phases = {row[5]: row[1] for row in rows_of_stacks(text, trainer)[7]}
    evaluated = {at for at, phase in phases.items() if phase == "evaluation"}
    assert evaluated == {4, 5, 14}


SOURCE = """\
def train():
    for epoch in range(9):
        for x in batches:
            step(x)
        with no_grad():
            for x in held_out:
                model(x)
        if epoch % 2:
            print(look())

def look():
    return score(
        held_out)

train()
"""


def test_an_evaluation_is_the_largest_statement_without_a_training_step(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text(SOURCE)
    training = [[f"{file}", 4, "train"], [f"{file}", 15, "<module>"]]
    inline = [[f"{file}", 15], [f"{file}", 6]]
    assert evaluation_lines([inline], training) == {f"{file}": {5, 6, 7}}
    called = [[f"{file}", 15], [f"{file}", 9], [f"{file}", 13]]
    assert evaluation_lines([called], training) == {f"{file}": {8, 9}}
    assert evaluation_lines([[[f"{file}", 15], [f"{file}", 4]]], training) == {}
    assert evaluation_lines([[["/nowhere.py", 1]]], training) == {}


C_CODE = """
import os, time, torch
from pathlib import Path
from torch import nn
torch.set_num_threads(1)
table, index = torch.randn(100_000, 64), torch.randint(100_000, (20_000,))
seen = list(range(300_000))
left = torch.randn(500, 500)
model = nn.Linear(8, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
clock = [0.0] * 4
def test():
    began = time.perf_counter()
    rows = table[index]
    first = time.perf_counter()
    is_there = 300_000 in seen
    second = time.perf_counter()
    product = left @ left
    third = time.perf_counter()
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    end = time.perf_counter()
    for number, seconds in enumerate((first - began, second - first, third - second, end - began)):
        clock[number] += seconds
while True:
    test()
    folder = Path(os.environ["FLAMBEAU_TRIAL"])
    (folder / "new").write_text(" ".join(str(one / clock[3]) for one in clock))
    (folder / "new").replace(folder / "told")
"""


def test_very_short_steps_are_looked_at_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(
        outside_sampler.subprocess, "Popen", lambda command, **_: started.append(command)
    )
    monkeypatch.setattr(outside_sampler, "_failure_on", lambda _: "")
    for process, text in (("7", ""), ("8", SHORT)):
        (tmp_path / f"{process}.trains").touch()
        (tmp_path / f"{process}.window").write_text(text)
    OutsideSampler(tmp_path).poll()
    rates = {one[one.index("--pid") + 1]: int(one[one.index("--rate") + 1]) for one in started}
    assert rates.keys() == {"7", "8"}
    assert rates["8"] < rates["7"] / 2


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_c_code_that_is_no_call_has_its_own_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "train.py"
    file.write_text(C_CODE)
    told: list[str] = []
    with Sandbox() as sandbox:
        trial = Script([sys.executable, f"{file}"], sandbox, 120).run(
            # Long enough for many samples, also where other tests take most of the processor.
            Plan(warmup_steps=3, warmup_s=0.1, steps=8, seconds=8.0),
            before_removal=lambda folder: told.append((folder / "told").read_text()),
        )
    assert trial.inside_because == ""
    (trainer,) = trial.trainers
    # `test` trains, so nothing in it is an evaluation.
    seconds = by_line(rows_of(trainer), ("", "python"))
    own = [float(word) for word in told[0].split()]
    lines = [number for number, text in enumerate(C_CODE.splitlines(), 1) if "    rows =" in text]
    for place in range(3):
        share = seconds.get(f"{file}:{lines[0] + 2 * place}", 0.0) / trainer["seconds"]
        assert share == pytest.approx(own[place], abs=0.15)
    assert sum(own[:3]) > 0.6, "else this shows nothing"


def test_the_reason_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(outside_sampler, "program", lambda: None)
    assert why_not.__wrapped__() == "py-spy is not installed"
    denied = tmp_path / "py-spy"
    denied.write_text("#!/bin/sh\necho 'Error: Permission denied (os error 13)' >&2\nexit 1\n")
    denied.chmod(0o755)
    monkeypatch.setattr(outside_sampler, "program", lambda: f"{denied}")
    assert "--cap-add SYS_PTRACE" in why_not.__wrapped__()
    denied.write_text("#!/bin/sh\necho 'Error: it is Thursday' >&2\necho trace >&2\nexit 1\n")
    assert why_not.__wrapped__() == "py-spy: it is Thursday"
