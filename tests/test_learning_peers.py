"""How bench/learning_peers.py counts, and that its twins are the planted scripts with the mistake undone."""

import json
from pathlib import Path

import pytest

from load_script import load_script

BENCH = Path(__file__).resolve().parents[1] / "bench"
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(BENCH)  # as for a script
    peers = load_script(BENCH / "learning_peers.py")


def failed(relation, text):
    return json.dumps({"invariant": {"relation": relation, "text_description": text}}, indent=4)


CALLS = ("APIContainRelation", "SGD.step() changes Parameter.data")
ORDER = ("FunctionLeadRelation", "zero_grad() always precedes step()")


def test_a_log_is_read_as_the_violated_invariants_each_once():
    log = "\n".join([failed(*CALLS), failed(*ORDER), failed(*CALLS)]) + "\n"
    assert peers.read_violations(log) == {CALLS, ORDER}
    assert peers.read_violations("\n") == frozenset()


def test_a_mistake_counts_only_if_its_twin_does_not_violate_the_same():
    rows = [
        {"script": "found.py", "planted": frozenset({CALLS, ORDER}), "twin": frozenset({ORDER})},
        {"script": "by_order.py", "planted": frozenset({ORDER}), "twin": frozenset()},
        {"script": "same.py", "planted": frozenset({CALLS}), "twin": frozenset({CALLS})},
        {"script": "quiet.py", "planted": frozenset(), "twin": frozenset()},
        {"script": "crashed.py", "error": "it ended with 1"},
    ]
    assert peers.count(rows) == {
        "asked": 4,
        "found": 2, "names_found": ["found.py", "by_order.py"], "twins_accused": 2,
        "found_without_order": 1, "names_found_without_order": ["found.py"],
        "twins_accused_without_order": 1,
    }  # fmt: skip


@pytest.mark.parametrize("script", peers.TWINS)
def test_a_twin_differs_from_its_planted_script_and_compiles(script):
    planted = (peers.SCRIPTS / "planted" / script).read_text(encoding="utf-8")
    twin = peers.twin_of(script, planted)
    assert twin != planted
    compile(peers.with_model_variable(twin), script, "exec")


def test_a_text_that_is_not_there_once_is_refused():
    with pytest.raises(ValueError, match=r"loss_maximized.py has this 0 times"):
        peers.twin_of("loss_maximized.py", "import torch\n")
