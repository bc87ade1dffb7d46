"""An index is built once for a file, and again whenever there is a doubt."""

from pathlib import Path

import numpy as np
import pytest

from flambeau.data.sources.index_cache import stored_index


class Build:
    """Counts how often it is called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> dict[str, np.ndarray]:
        self.calls += 1
        return {"starts": np.arange(5) * self.calls, "names": np.array(["a", "\u00e9"])}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "data.tar").write_bytes(bytes(300_000))
    return tmp_path / "data.tar"


def test_it_is_built_once(path: Path) -> None:
    build = Build()
    first = stored_index(path, build, kind="tar 1")
    again = stored_index(path, build, kind="tar 1")
    assert build.calls == 1
    assert sorted(first) == sorted(again) == ["names", "starts"]
    assert again["starts"].tolist() == [0, 1, 2, 3, 4]
    assert again["names"].tolist() == ["a", "\u00e9"]
    assert [p.name for p in path.parent.iterdir() if p != path] == ["data.tar.flambeau-index"]


def with_member_field(data: bytes, offset: int, value: int) -> bytes:
    """A zip file whose first entry in the directory has another value: 8 for flags, 10 for compression."""
    changed = bytearray(data)
    changed[data.index(b"PK\1\2") + offset] = value
    return bytes(changed)


@pytest.mark.parametrize(
    "change", ["size", "end", "kind", "cut", "noise", "empty", "method", "lock"]
)
def test_it_is_built_again_for_another_file_and_after_damage(path: Path, change: str) -> None:
    build, kept = Build(), path.with_name("data.tar.flambeau-index")
    stored_index(path, build, kind="tar 1")
    if change == "size":
        path.write_bytes(bytes(300_001))
    elif change == "end":
        path.write_bytes(bytes(299_999) + b"x")
    elif change == "cut":
        kept.write_bytes(kept.read_bytes()[:-30])
    elif change == "noise":
        kept.write_bytes(b"noise")
    elif change == "method":
        kept.write_bytes(with_member_field(kept.read_bytes(), 10, 93))
    elif change == "lock":
        kept.write_bytes(with_member_field(kept.read_bytes(), 8, 1))
    elif change == "empty":
        kept.write_bytes(b"")
    kind = "tar 2" if change == "kind" else "tar 1"
    assert stored_index(path, build, kind=kind)["starts"].tolist() == [0, 2, 4, 6, 8]
    assert stored_index(path, build, kind=kind)["starts"].tolist() == [0, 2, 4, 6, 8]
    assert build.calls == 2


def test_where_it_cannot_be_kept_it_is_built_each_time(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    build = Build()
    monkeypatch.setattr(np, "savez", full)
    stored_index(path, build, kind="tar 1")
    stored_index(path, build, kind="tar 1")
    assert build.calls == 2
    assert list(path.parent.iterdir()) == [path]
