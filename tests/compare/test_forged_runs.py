"""A forgery of each kind is seen, no honest interval is accused: bench/faults/forged_runs.py."""

import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(f"{Path(__file__).parents[2] / 'bench' / 'faults'}")
    monkeypatch.syspath_prepend(f"{Path(__file__).parents[2] / 'bench'}")
    import forged_runs  # type: ignore[import-not-found]

    for name in ("forged_runs", "provenance"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    found: ModuleType = forged_runs
    return found


@pytest.mark.slow
def test_each_kind_of_forgery_is_seen(bench: ModuleType, tmp_path: Path) -> None:
    bench.prepare(tmp_path)
    found = bench.check_forgeries(tmp_path, few=True)
    assert found["missed"] == []
    assert found["elsewhere"] == 0
    assert found["num"] >= 11
    honest = bench.check_honest(tmp_path, few=True)
    assert honest == {"honest_intervals": 12, "accused": []}
