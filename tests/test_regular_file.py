"""A file is read whole, and what need not have an end is refused."""

import os
from pathlib import Path

import pytest

from flambeau.regular_file import read_file


def test_a_file_is_read_whole(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"\0x\n" * 1000)
    assert read_file(file) == b"\0x\n" * 1000


def test_nothing_else_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(OSError, match="a pipe or a device, and no file"):
            read_file(path)
    with pytest.raises(IsADirectoryError):
        read_file(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "b")
