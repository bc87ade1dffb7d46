"""The examples of the rules are run on the torch that is here.

The bad one does what its rule says: an error, a warning of this class, or nothing.
The good one runs without a warning; and where both give numbers, they are the same for what is merely old.
"""

import contextlib
import importlib.metadata
import importlib.util
import multiprocessing
import os
import pickle
import re
import shutil
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import example_drivers
from example_drivers import AS_IT_STANDS, DRIVERS, NO_GPU, NOT_RUN, Driver
from flambeau_lint.rule import Rule
from flambeau_lint.rules.catalog import BY_CODE, RULES
from flambeau_lint.versions import installed_versions, is_before

pytestmark = pytest.mark.slow

# Their classes differ between versions of torch.
CHANGED_CLASS = {"FLB259", "FLB260", "FLB261", "FLB262", "FLB263", "FLB446"}
# The good one warns in some versions: `[from, to)`. Torch has taken the notice back.
NOTICE = {"FLB249": ("2.13", "2.15"), "FLB250": ("2.13", "2.15")}
# What the good one needs beside what it imports: a module, or a program.
_ONNX = ("FLB192", "FLB193", "FLB194", "FLB195", "FLB2140", "FLB2141", "FLB2142")
NEEDS_MODULE = dict.fromkeys(_ONNX, "onnxscript")
NEEDS_PROGRAM = {"FLB1192": "ffmpeg", "FLB1195": "ffmpeg", "FLB504": "openssl"}
INSTALLED = installed_versions()

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_GPU)


def is_installed(library: str) -> bool:
    name = "pytorch-lightning" if library == "lightning" else library  # which the examples import
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def missing(rule: Rule) -> str:
    """What the good example needs and is not here; empty if there is nothing."""
    roots = re.findall(r"^(?:import|from) (\w+)", rule.good, re.MULTILINE)
    roots += [NEEDS_MODULE[rule.code]] if rule.code in NEEDS_MODULE else []
    lacking = [root for root in roots if importlib.util.find_spec(root) is None]
    program = NEEDS_PROGRAM.get(rule.code, "")
    lacking += [program] if program and not shutil.which(program) else []
    return ", ".join(lacking)


def not_run(rule: Rule) -> dict[str, str]:
    """Which of its examples, 'bad' or 'good', cannot be run here, and why."""
    version = INSTALLED[rule.library]
    if not rule.holds(version, since="0.0.1") and not rule.until:
        return dict.fromkeys(("bad", "good"), f"it says nothing of {rule.library} {version}")
    reasons = {}
    if not is_installed(rule.library):
        reasons["bad"] = f"{rule.library} is not installed"
    if lacking := missing(rule):
        reasons["good"] = f"{lacking} is not installed"
    return reasons | NOT_RUN.get(rule.code, {})


@dataclass(frozen=True)
class Outcome:
    """What a program leaves in `out` and `did`, the class of its error, and those of its warnings."""

    out: Any
    did: Any
    error: str
    kinds: list[str]


def run(text: str, driver: Driver = AS_IT_STANDS) -> Outcome:
    text = driver.before + text + driver.after
    file = Path("example.py")
    file.write_text(text)  # for what reads its own source
    space: dict[str, Any] = {"__name__": "example", "made": example_drivers}
    error = ""
    torch.manual_seed(0)
    dtype = torch.get_default_dtype()
    warn_always = torch.is_warn_always_enabled()
    with warnings.catch_warnings(record=True) as seen, mock.patch.dict(os.environ):
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", message=".*tensorboardX")  # Lightning's, where it lacks
        warnings.filterwarnings(
            "ignore", message=".*LeafSpec"
        )  # of Lightning's and torch.onnx's own code
        torch.set_warn_always(True)
        try:
            exec(compile(text, str(file.resolve()), "exec", dont_inherit=True), space)
        except Exception as caught:
            error = type(caught).__name__
        finally:
            torch.set_warn_always(warn_always)
            torch.set_default_dtype(dtype)
    kinds = [one.category.__name__ for one in seen]
    return Outcome(space.get("out"), space.get("did"), error, kinds)


@pytest.fixture(autouse=True)
def _a_folder_for_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run_in(name: str, text: str, driver: Driver) -> Outcome:
    """Run it in a folder of its own below this one."""
    Path(name).mkdir()
    with contextlib.chdir(name):
        if not driver.is_alone:
            return run(text, driver)
        child = multiprocessing.get_context("fork").Process(target=leave, args=(text, driver))
        child.start()
        child.join()
        outcome: Outcome = pickle.loads(Path("outcome").read_bytes())
        return outcome


def leave(text: str, driver: Driver) -> None:
    """Run it, and leave what it did in a file."""
    Path("outcome").write_bytes(pickle.dumps(run(text, driver)))


def check_bad(rule: Rule, bad: Outcome) -> None:
    version = INSTALLED[rule.library]
    is_gone = bool(rule.removed) and not is_before(version, rule.removed)
    if rule.runs.endswith("Warning"):
        assert bad.error == ""
        is_stable = rule.code not in CHANGED_CLASS
        assert rule.runs in bad.kinds if is_stable else bad.kinds
    elif rule.runs == "silent":
        assert (bad.error, bad.kinds) == ("", [])
    elif is_gone or not rule.removed:
        assert bad.error == rule.runs or (rule.code in CHANGED_CLASS and bad.error)


def check_good(rule: Rule, good: Outcome) -> None:
    first, end = NOTICE.get(rule.code, ("", ""))
    if first and not is_before(INSTALLED["torch"], first) and is_before(INSTALLED["torch"], end):
        assert set(good.kinds) == {"FutureWarning"}
    else:
        assert good.kinds == []
    assert good.error == ""


def check_both(rule: Rule, bad: Outcome, good: Outcome) -> None:
    comparable = (torch.Tensor, float, int, bool, tuple)
    old = bad.out
    is_same = rule.kind in ("deprecated", "removed", "slow") and type(good.out) is type(old)
    if isinstance(old, torch.Tensor) and any(getattr(old, "names", ())):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch before 2.13
            old = old.rename(None)  # numbers of named tensors are not compared
    if is_same and isinstance(good.out, comparable):
        torch.testing.assert_close(good.out, old)
    is_list = isinstance(good.out, (*comparable, list))
    if rule.kind == "wrong" and rule.runs == "silent" and is_list:
        assert repr(good.out) != repr(old)
    if rule.runs == "silent" and "did" in DRIVERS.get(rule.code, AS_IT_STANDS).after:
        assert bad.did != good.did


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_what_the_rule_says(rule: Rule) -> None:
    left_out = not_run(rule)
    if len(left_out) == 2:
        pytest.skip(f"{rule.code}: {', '.join(dict.fromkeys(left_out.values()))}")
    driver = DRIVERS.get(rule.code, AS_IT_STANDS)
    outcomes = {}
    for side, text, check in (("bad", rule.bad, check_bad), ("good", rule.good, check_good)):
        if side not in left_out:
            outcomes[side] = run_in(side, text, driver)
            check(rule, outcomes[side])
    if len(outcomes) == 2:
        check_both(rule, outcomes["bad"], outcomes["good"])


@pytest.mark.parametrize("code", NOT_RUN)
def test_what_is_left_out_cannot_run(code: str) -> None:
    rule = BY_CODE[code]
    for side, reason in NOT_RUN[code].items():
        if reason == NO_GPU and torch.cuda.is_available():
            continue
        outcome = run_in(side, getattr(rule, side), DRIVERS.get(code, AS_IT_STANDS))
        assert outcome.error, f"{side} runs: {reason}"


def run_in_new_python(text: str) -> "subprocess.CompletedProcess[str]":
    """In a process in which CUDA has not started."""
    words = [sys.executable, "-W", "always", "-c", text]
    return subprocess.run(words, capture_output=True, text=True, check=False)


@pytest.mark.gpu
@needs_cuda
def test_on_a_gpu_types_of_tensors() -> None:
    rule = BY_CODE["FLB2114"]
    bad, good = (run_in_new_python(f"{text}print(out)\n") for text in (rule.bad, rule.good))
    assert bad.stdout == good.stdout == "tensor([1., 2.], device='cuda:0')\n"
    assert f"{rule.runs}: " in bad.stderr
    assert good.stderr == ""


@pytest.mark.gpu
@needs_cuda
def test_on_a_gpu_visible_devices() -> None:
    """The good one can hide all of them, where there may be no second one to choose."""
    rule = BY_CODE["FLB407"]
    bad, good = (
        run_in_new_python(text.replace("'1'", "''") + "print(torch.cuda.device_count())\n")
        for text in (rule.bad, rule.good)
    )
    assert (bad.stdout, bad.stderr) == (f"{torch.cuda.device_count()}\n", "")
    assert good.stdout == ""
    assert "CUDA" in good.stderr.splitlines()[-1]


def test_what_runs_nowhere_else_has_a_test_on_a_gpu() -> None:
    sides = {code for code, reasons in NOT_RUN.items() if list(reasons.values()) == [NO_GPU] * 2}
    assert sides == {"FLB2114", "FLB407"}


def test_each_driver_is_of_a_rule() -> None:
    assert set(DRIVERS) | set(NOT_RUN) | set(NOTICE) | CHANGED_CLASS <= set(BY_CODE)


def test_a_wrong_claim_would_be_seen() -> None:
    quiet = run("import torch\n\nout = torch.ones(2)\n")
    assert (quiet.error, quiet.kinds) == ("", [])
    assert run("import torch\n\ntorch.nothing\n").error == "AttributeError"
    text = "import torch\n\nout = torch.nn.init.normal(torch.empty(2))\n"
    assert run(text).kinds == ["FutureWarning"]
    with contextlib.suppress(AssertionError):
        torch.testing.assert_close(torch.ones(2), torch.zeros(2))
        raise ValueError("numbers are not compared")
