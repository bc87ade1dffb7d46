"""The cache of a process, which threads of a forked process ask for at the same moment."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flambeau.data.sources import store_files
from flambeau.data.stores.block_cache import BlockCache, CacheOptions


def test_threads_after_a_fork_get_one_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entries of the process before are dropped by whichever thread comes first."""
    options = CacheOptions(tmp_path)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            for _ in range(30):
                old = {(-1, Path(f"{number}"), 1): None for number in range(300)}
                monkeypatch.setattr(store_files, "_processes", old)
                barrier = threading.Barrier(8)

                def ask(barrier: threading.Barrier = barrier) -> BlockCache:
                    barrier.wait()
                    return store_files.cache_of(options)

                found = [one.result() for one in [pool.submit(ask) for _ in range(8)]]
                assert len({id(cache) for cache in found}) == 1
                assert len(old) == 1
    finally:
        sys.setswitchinterval(before)
