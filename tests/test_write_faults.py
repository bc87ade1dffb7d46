"""Some cases of bench/faults/write_faults.py, and that what is bad is seen."""

import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from load_script import load_script

SCRIPT = Path(__file__).parents[1] / "bench" / "faults" / "write_faults.py"

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="numbers of its system calls"
)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script(SCRIPT)


@pytest.fixture(scope="module")
def inputs(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("write_faults")
    (folder / "case").mkdir()
    script.make_inputs(folder / "case")
    (folder / "case").rename(folder / "inputs")
    return folder


@pytest.fixture(scope="module")
def references(script: ModuleType, inputs: Path) -> Iterator[Any]:
    known: dict[str, Any] = {}

    def find(name: str) -> Any:
        if name not in known:
            (job,) = (job for job in script.JOBS if job.name == name)
            (inputs / f"{len(known)}").mkdir()
            known[name] = script.reference(
                job, inputs / "inputs", inputs / f"{len(known)}", inputs / "case"
            )
        return known[name]

    return find


def judged(script: ModuleType, of: Any, fault: Any) -> tuple[str, list[str]]:
    place = of.folder.parent / "case"
    try:
        outcome, bad, _ = script.judge(of, fault, place)
    finally:
        script.shutil.rmtree(place)
    return outcome, bad


def call_of(of: Any, text: str) -> Any:
    return next(call for call in of.calls if text in f"{call}")


@pytest.mark.parametrize(
    ("job", "call", "kind", "lasts", "outcome"),
    [
        ("train", "write new/.lock", "EROFS", True, "refused"),
        ("train", "write new/checkpoints/.step-00000002.*.tmp/model", "torn", False, "killed"),
        ("train", "write new/metrics.jsonl 2", "ENOSPC", True, "refused"),
        ("train", "write new/.config.toml", "short", False, "the same end"),
        ("pack a.rec --shards 2", "rmdir .a_val.rec.flambeau-shards", "kill", False, "killed"),
        ("pack a.tfrecord", "fsync .a.tfrecord.packing/00000.tmp/a_train", "EIO", False, "refused"),
        (
            "pack a.npy --encode raw",
            "write .a.npy.packing/00000.tmp/a_train_lab",
            "short",
            False,
            "the same end",
        ),
        ("convert old.safetensors", "rename .old.safetensors", "kill", False, "killed"),
        ("report page.html", "rename page.html", "kill", False, "killed"),
        ("lint", "rename script.py", "ESTALE", False, "refused"),
    ],
)
def test_a_fault_is_told_and_the_same_command_repairs_it(
    script: ModuleType, references: Any, job: str, call: str, kind: str, lasts: bool, outcome: str
) -> None:
    of = references(job)
    fault = script.Fault(call_of(of, call), kind, lasts)
    assert judged(script, of, fault) == (outcome, [])


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("a.tfrecord.1a2b3c4d.tmp", "a.tfrecord.*.tmp"),
        ("a.tfrecord.12345678.tmp", "a.tfrecord.*.tmp"),  # random, too: one of forty is so
        ("step-00000002/model.safetensors", "step-00000002/model.safetensors"),
    ],
)
def test_a_call_is_found_again_by_its_name(script: ModuleType, path: str, shown: str) -> None:
    assert script.without_random_names(path) == shown


# ------------------------------------------------------------------ what is bad is seen

WRITER = """
import os, pathlib, sys
pathlib.Path('a.txt').write_text('first')
try:
    with open('b.txt', 'wb', buffering=0) as file:
        rest = memoryview(b'0123456789')
        while rest:
            rest = rest[file.write(rest):]
except OSError as error:
    {handler}
"""


def written(script: ModuleType, folder: Path, handler: str, fault: Any) -> Any:
    (folder / "case").mkdir()
    (folder / "case" / "job.py").write_text(WRITER.format(handler=handler))
    return script.start("job.py", folder / "case", fault)


@pytest.mark.parametrize(
    ("kind", "code", "content"),
    [("ENOSPC", 0, ""), ("short", 0, "0123456789"), ("torn", -9, "01234"), ("kill", -9, "")],
)
def test_a_call_is_answered_from_outside(
    script: ModuleType, tmp_path: Path, kind: str, code: int, content: str
) -> None:
    fault = script.Fault(script.Call("write", "b.txt", 0), kind)
    started = written(script, tmp_path, "print('told', error.errno)", fault)
    assert started.code == code
    assert [f"{call}" for call in started.hit] == ["write b.txt 0"]
    assert [f"{call}" for call in started.calls][:4] == (
        ["create a.txt 0", "write a.txt 0", "create b.txt 0", "write b.txt 0"]
    )
    assert (tmp_path / "case" / "b.txt").read_text() == content
    assert ("told 28" in started.said) == (kind == "ENOSPC")


@pytest.mark.parametrize(
    ("handler", "bad"),
    [
        ("pass", ["silently differs: b.txt"]),
        ("sys.exit(3)", ["exit code 3", "not named: []"]),
        ("os.remove('a.txt'); sys.exit(f'b.txt: {error.strerror}')", []),
        ("os.remove('job.py'); sys.exit(f'b.txt: {error.strerror}')", ["lost: job.py"]),
        ("open('c.txt', 'w'); sys.exit(f'b.txt: {error.strerror}')", ["again: left: c.txt"]),
    ],
)
def test_what_is_bad_is_seen(
    script: ModuleType, tmp_path: Path, handler: str, bad: list[str]
) -> None:
    (tmp_path / "inputs").mkdir()
    (tmp_path / "inputs" / "job.py").write_text(WRITER.format(handler=handler))
    (tmp_path / "0").mkdir()
    job = script.Job("writer", "job.py")
    of = script.reference(job, tmp_path / "inputs", tmp_path / "0", tmp_path / "case")
    fault = script.Fault(script.Call("write", "b.txt", 0), "ENOSPC")
    outcome, found = judged(script, of, fault)
    assert [text for text in found if not text.startswith("again: missing")][: len(bad)] == bad
    assert bool(found) == bool(bad)
    assert outcome == ("went on, and told" if handler == "pass" else "refused")


def test_every_call_meets_every_fault(script: ModuleType) -> None:
    calls = [script.Call("write", "a", 0), script.Call("rename", "b", 0)]
    found = list(script.faults_of(calls))
    assert len(found) == len(set(found)) == 22
    assert {fault.kind for fault in found if fault.call.name == "rename"} == (
        {"kill", "EIO", "ENOSPC", "EDQUOT", "ESTALE", "EROFS"}
    )
    assert os.strerror(28) == script.answer_of(script.Fault(calls[0], "ENOSPC"))
