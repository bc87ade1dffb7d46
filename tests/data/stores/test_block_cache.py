"""The cache of blocks: bounded, verified, shared by processes, safe against kills and full disks."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flambeau.data.stores import block_cache
from flambeau.data.stores.block_cache import BlockCache, CacheOptions, parse_bytes
from flambeau.errors import InputError

KB = 1000


def key_of(number: int) -> str:
    return f"{number:032x}"


def content(number: int, size: int = 100 * KB) -> bytes:
    return bytes([number % 256]) * size


def never() -> bytes:
    raise AssertionError("this block is there")


def soon() -> float:
    return time.monotonic() + 30


def cache_at(folder: Path, size: int = 10**9, told: list[str] | None = None) -> BlockCache:
    return BlockCache(CacheOptions(folder, size), tell=([] if told is None else told).append)


def read(cache: BlockCache, number: int, fetch: Callable[[], bytes]) -> bytes:
    return cache.read(key_of(number), 10, 20, fetch, until=soon())


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_a_block_is_fetched_once_and_read_by_others(tmp_path: Path) -> None:
    first = cache_at(tmp_path)
    assert read(first, 7, lambda: content(7)) == content(7, 20)
    assert read(first, 7, never) == content(7, 20)
    assert read(cache_at(tmp_path), 7, never) == content(7, 20)


@pytest.mark.parametrize("change", ["cut", "flip", "empty", "long"])
def test_a_damaged_file_is_fetched_again(tmp_path: Path, change: str) -> None:
    read(cache_at(tmp_path), 7, lambda: content(7))
    (path,) = files_in(tmp_path / "blocks")
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    changed = {"cut": data[:-1], "flip": data, "empty": b"", "long": path.read_bytes() + b"x"}
    path.write_bytes(changed[change])
    again = cache_at(tmp_path)
    assert read(again, 7, lambda: content(7)) == content(7, 20)
    assert read(cache_at(tmp_path), 7, never) == content(7, 20)


def test_a_file_that_is_cut_while_it_is_open_is_fetched_again(tmp_path: Path) -> None:
    cache = cache_at(tmp_path)
    read(cache, 7, lambda: content(7))
    (path,) = files_in(tmp_path / "blocks")
    os.truncate(path, 12)
    assert read(cache, 7, lambda: content(7)) == content(7, 20)


def test_it_stays_within_its_size_and_removes_the_longest_unused(tmp_path: Path) -> None:
    cache = cache_at(tmp_path, 1000 * KB)
    for number in range(9):
        read(cache, number, lambda number=number: content(number))
        path = tmp_path / "blocks" / key_of(number)[:2] / key_of(number)
        os.utime(path, (1000 + number, 1000 + number))
    os.utime(tmp_path / "blocks" / "00" / key_of(0))  # used just now
    for number in range(9, 12):
        read(cache, number, lambda number=number: content(number))
    kept = {int(path.name, 16) for path in files_in(tmp_path / "blocks")}
    assert sum(path.stat().st_size for path in files_in(tmp_path / "blocks")) <= 1000 * KB
    assert 0 in kept
    assert {9, 10, 11} <= kept
    assert not {1, 2} & kept


def test_what_is_removed_while_it_is_open_is_still_read(tmp_path: Path) -> None:
    cache = cache_at(tmp_path)
    read(cache, 7, lambda: content(7))
    for path in files_in(tmp_path / "blocks"):
        path.unlink()
    assert read(cache, 7, never) == content(7, 20)


def test_blocks_larger_than_the_cache_are_read_without_it(tmp_path: Path) -> None:
    cache = cache_at(tmp_path, 50 * KB)
    assert read(cache, 7, lambda: content(7)) == content(7, 20)
    assert files_in(tmp_path / "blocks") == []


def test_threads_fetch_a_block_once(tmp_path: Path) -> None:
    cache = cache_at(tmp_path)
    fetched = []

    def fetch() -> bytes:
        fetched.append(1)
        time.sleep(0.1)
        return content(7)

    found = []
    threads = [
        threading.Thread(target=lambda: found.append(read(cache, 7, fetch))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [content(7, 20)] * 8
    assert fetched == [1]


_READER = """
import sys, time
from pathlib import Path
from flambeau.data.stores.block_cache import BlockCache, CacheOptions
folder, wait_s = Path(sys.argv[1]), float(sys.argv[2])
cache = BlockCache(CacheOptions(folder))
for number in range(4):
    def fetch():
        with (folder / "fetched").open("a") as file:
            file.write(f"{number}\\n")
        time.sleep(wait_s)
        return bytes([number]) * 100_000
    data = cache.read(f"{number:032x}", 10, 20, fetch, until=time.monotonic() + 60)
    assert data == bytes([number]) * 20
"""


def start_reader(folder: Path, wait_s: float) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", _READER, f"{folder}", f"{wait_s}"], text=True)


def test_processes_fetch_a_block_once(tmp_path: Path) -> None:
    readers = [start_reader(tmp_path, 0.2) for _ in range(3)]
    assert [reader.wait() for reader in readers] == [0, 0, 0]
    assert sorted((tmp_path / "fetched").read_text().split()) == ["0", "1", "2", "3"]


def test_who_is_killed_while_it_fetches_holds_up_nobody(tmp_path: Path) -> None:
    reader = start_reader(tmp_path, 600)
    while not (tmp_path / "fetched").exists():
        time.sleep(0.01)
    reader.send_signal(signal.SIGKILL)
    reader.wait()
    assert read(cache_at(tmp_path), 0, lambda: content(0)) == content(0, 20)


def test_who_is_stopped_while_it_fetches_holds_up_nobody_for_long(tmp_path: Path) -> None:
    reader = start_reader(tmp_path, 600)
    try:
        while not (tmp_path / "fetched").exists():
            time.sleep(0.01)
        reader.send_signal(signal.SIGSTOP)
        cache = cache_at(tmp_path)
        until = time.monotonic() + 0.2
        assert cache.read(key_of(0), 10, 20, lambda: content(0), until=until) == content(0, 20)
    finally:
        reader.kill()
        reader.wait()


_WRITER = """
import os, signal, sys
from pathlib import Path
from flambeau.data.stores.block_cache import BlockCache, CacheOptions
cache = BlockCache(CacheOptions(Path(sys.argv[1])))
os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
cache.put("0" * 32, bytes(100_000))
"""


def test_a_kill_during_a_write_leaves_no_block_and_nothing_for_ever(tmp_path: Path) -> None:
    writer = subprocess.run([sys.executable, "-c", _WRITER, f"{tmp_path}"], check=False)
    assert writer.returncode == -signal.SIGKILL
    (left,) = files_in(tmp_path / "tmp")
    cache = cache_at(tmp_path)
    assert read(cache, 0, lambda: content(0)) == content(0, 20)
    assert left.exists()  # young: its writer may be about to lock it
    os.utime(left, (0, 0))
    cache.remove_stale()
    assert files_in(tmp_path / "tmp") == []


def test_temporary_files_in_use_stay(tmp_path: Path) -> None:
    cache = cache_at(tmp_path)
    with cache.new_file() as file, cache.new_folder() as folder:
        os.utime(file.name, (0, 0))
        os.utime(folder, (0, 0))
        cache_at(tmp_path).remove_stale()
        assert Path(file.name).exists()
        assert folder.exists()
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_full_disk_is_told_once_and_reading_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def full(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    told: list[str] = []
    cache = cache_at(tmp_path, told=told)
    monkeypatch.setattr(block_cache.os, "replace", full)
    for block in range(3):
        assert read(cache, block, lambda block=block: content(block)) == content(block, 20)
        assert read(cache, block, never) == content(block, 20)  # still in memory
    (message,) = told
    assert str(tmp_path) in message
    assert "--cache-size" in message
    assert files_in(tmp_path) == [path for path in files_in(tmp_path) if "locks" in path.parts]


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(InputError, match=r"cannot be made: not a directory\nName a folder"):
        cache_at(tmp_path / "file" / "cache")


@pytest.mark.parametrize(
    ("text", "size"), [("50GB", 50 * 10**9), ("500 mb", 5 * 10**8), ("1.5TB", 15 * 10**11)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text, name="cache_size") == size


@pytest.mark.parametrize("text", ["", "50", "0GB", "-1GB", "GB", "50 bytes", "1e3GB", "50GiB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"cache_size must be a size such as 50GB"):
        parse_bytes(text, name="cache_size")


def test_a_process_that_is_forked_meanwhile_keeps_no_lock(tmp_path: Path) -> None:
    """Workers are forked while threads fetch, and inherit the open file of a lock."""
    cache = cache_at(tmp_path)
    with cache.alone(key_of(7), soon()):
        pid = os.fork()
        if pid == 0:
            signal.pause()
            os._exit(0)
    try:
        (lock,) = files_in(tmp_path / "locks")
        with lock.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError if it is held
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert read(cache, 7, lambda: content(7)) == content(7, 20)
