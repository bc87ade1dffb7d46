"""The examples of the rules are run on the torch that is here.

The bad one does what its rule says: an error, a warning of this class, or nothing.
The good one runs without a warning; and where both give numbers, they are the same for what is merely old.
"""

import contextlib
import importlib.metadata
import warnings
from typing import Any

import pytest
import torch

from flambeau_lint.rule import Rule
from flambeau_lint.rules.catalog import RULES
from flambeau_lint.versions import installed_versions, is_before

pytestmark = pytest.mark.slow

# DeprecationWarning in some versions of torch, FutureWarning in others.
CHANGED_CLASS = {"FLB259", "FLB260"}
INSTALLED = installed_versions()


def is_installed(library: str) -> bool:
    name = "pytorch-lightning" if library == "lightning" else library  # which the examples import
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


RUN = [rule for rule in RULES if rule.runs != "static" and is_installed(rule.library)]


def run(text: str) -> tuple[Any, str, list[str]]:
    """What a program leaves in `out`, the class of its error, and those of its warnings."""
    space: dict[str, Any] = {"__name__": "example"}
    error = ""
    torch.manual_seed(0)
    dtype = torch.get_default_dtype()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", message=".*tensorboardX")  # Lightning's, where it lacks
        warn_always = torch.is_warn_always_enabled()
        torch.set_warn_always(True)
        try:
            exec(compile(text, "example", "exec", dont_inherit=True), space)
        except Exception as caught:
            error = type(caught).__name__
        finally:
            torch.set_warn_always(warn_always)
            torch.set_default_dtype(dtype)
    kinds = [one.category.__name__ for one in seen]
    return space.get("out"), error, kinds


@pytest.mark.parametrize("rule", RUN, ids=lambda rule: rule.code)
def test_what_the_rule_says(rule: Rule) -> None:
    version = INSTALLED[rule.library]
    bad, error, kinds = run(rule.bad)
    is_gone = bool(rule.removed) and not is_before(version, rule.removed)
    if rule.runs.endswith("Warning"):
        assert error == ""
        is_stable = rule.code not in CHANGED_CLASS
        assert rule.runs in kinds if is_stable else kinds
    elif rule.runs == "silent":
        assert (error, kinds) == ("", [])
    elif is_gone or not rule.removed:
        assert error == rule.runs
    good, error, kinds = run(rule.good)
    assert (error, kinds) == ("", [])
    comparable = (torch.Tensor, float, int, bool, tuple)
    is_same = rule.kind in ("deprecated", "removed", "slow") and type(good) is type(bad)
    if isinstance(bad, torch.Tensor) and any(getattr(bad, "names", ())):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch before 2.13
            bad = bad.rename(None)  # numbers of named tensors are not compared
    if is_same and isinstance(good, comparable):
        torch.testing.assert_close(good, bad)
    if rule.kind == "wrong" and rule.runs == "silent" and isinstance(good, (*comparable, list)):
        assert repr(good) != repr(bad)


def test_a_wrong_claim_would_be_seen() -> None:
    assert run("import torch\n\nout = torch.ones(2)\n")[1:] == ("", [])
    assert run("import torch\n\ntorch.nothing\n")[1] == "AttributeError"
    text = "import torch\n\nout = torch.nn.init.normal(torch.empty(2))\n"
    assert run(text)[2] == ["FutureWarning"]
    with contextlib.suppress(AssertionError):
        torch.testing.assert_close(torch.ones(2), torch.zeros(2))
        raise ValueError("numbers are not compared")
