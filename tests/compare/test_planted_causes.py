"""The causes of bench/planted_causes.py: each is named, at the step at which it acts first."""

import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(f"{Path(__file__).parents[2] / 'bench'}")
    import planted_causes  # type: ignore[import-not-found]

    for name in ("planted_causes", "provenance"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    found: ModuleType = planted_causes
    return found


@pytest.mark.slow
def test_every_cause_is_named_at_its_step(bench: ModuleType, tmp_path: Path) -> None:
    outcomes = list(bench.run_all(tmp_path))
    assert len(outcomes) >= 30
    assert [outcome for outcome in outcomes if not bench.is_good(outcome)] == []
