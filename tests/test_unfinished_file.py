"""Hidden names of files that are being written, and what is removed of killed writes."""

import os
from pathlib import Path

from flambeau.unfinished_file import unfinished


def test_only_what_killed_writes_of_the_same_file_have_left_is_removed(tmp_path: Path) -> None:
    old = [unfinished(tmp_path / "a"), unfinished(tmp_path / "a")]
    old[0].write_bytes(b"1")
    old[1].mkdir()
    (old[1] / "inside").write_bytes(b"1")
    others = [unfinished(tmp_path / "b"), tmp_path / ".a.tmp", tmp_path / "a"]
    for path in others:
        path.write_bytes(b"1")
    for path in (*old, *others):
        os.utime(path, (0, 0))
    (young := unfinished(tmp_path / "a")).write_bytes(b"1")
    assert sorted(tmp_path.iterdir()) == sorted([young, *others])
    assert not unfinished(tmp_path / "a").exists()


def test_a_folder_that_is_not_there_is_no_error(tmp_path: Path) -> None:
    assert unfinished(tmp_path / "no" / "a").parent == tmp_path / "no"
