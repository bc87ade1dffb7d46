"""A few hundred inputs of bench/faults/fuzz_parsers.py for each parser, and that what is bad is seen."""

import base64
import random
import shutil
import subprocess
import time
from pathlib import Path
from types import ModuleType

import pytest

from load_script import load_script

SCRIPT = Path(__file__).parents[1] / "bench" / "faults" / "fuzz_parsers.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script(SCRIPT)


def test_no_parser_fails_hangs_or_takes_memory(script: ModuleType) -> None:
    parsers = script.parsers()
    assert len(parsers) == 21
    for name, parser in parsers.items():
        found = script.fuzz_by_chance(parser, 200, seed=0, deadline=time.monotonic() + 60)
        assert (name, found.bad, found.executions) == (name, {}, 200)


def test_made_right_checksums_let_an_input_reach_what_lies_behind_them(
    script: ModuleType, tmp_path: Path
) -> None:
    parsers = {name: one for name, one in script.parsers().items() if one.mended}
    assert {*parsers} == {"tfrecord", "tar", "manifest", "png"}
    for name, parser in parsers.items():
        for data in parser.seeds(tmp_path):
            assert parser.mended(data) == data, name  # the right ones are known
    parser = parsers["tfrecord"]
    (whole,) = parser.seeds(tmp_path)
    other = whole[:13] + b"\xff" + whole[14:]
    path = tmp_path / "file"
    path.write_bytes(other)
    with pytest.raises(parser.refusals, match="checksum"):
        parser.read(path)
    path.write_bytes(parser.mended(other))
    parser.read(path)  # the example in it is refused by another parser, as it should be


def test_what_is_bad_is_seen(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "LONGEST_S", 0.2)

    def odd(path: Path) -> None:
        data = path.read_bytes()
        if data == b"seed":
            return
        if len(data) < 4:
            raise ValueError("refused in words")
        if b"\xff" in data:
            data.decode()  # a ValueError as well, but of no words of ours
        while len(data) > 100:
            pass

    parser = script.Parser(odd, lambda _: [b"seed"], (ValueError,))
    found = script.fuzz_by_chance(parser, 200, seed=1, deadline=time.monotonic() + 60)
    assert {cause.partition(" ")[0] for cause in found.bad} == {"UnicodeDecodeError", "hang"}
    for cause, text in found.bad.items():
        if cause.startswith("Unicode"):
            assert script.complaint(parser, base64.b64decode(text), tmp_path) == cause


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc with its sanitizers")
def test_the_kernel_under_sanitizers(script: ModuleType, tmp_path: Path) -> None:
    program = script.build_kernel(tmp_path, compiler="gcc")
    rng = random.Random(0)
    seeds = script.kernel_seeds()
    files = [tmp_path / f"{number}" for number in range(len(seeds) + 500)]
    for number, path in enumerate(files):
        data = seeds[number % len(seeds)]
        is_seed = number < len(seeds)
        path.write_bytes(data if is_seed else script.changed(data, seeds, rng))
    done = subprocess.run([program, *files], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
