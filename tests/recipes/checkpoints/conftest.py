"""Checkpoints are written as they are for a user: to the disk."""

from collections.abc import Iterator

import pytest

from forked_python import synced


@pytest.fixture(autouse=True)
def _synced() -> Iterator[None]:
    with synced():
        yield
