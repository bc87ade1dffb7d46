"""A claim on one run of a sweep."""

import errno
import os
from pathlib import Path

import pytest

from flambeau.experiments.claim import Claim


@pytest.mark.parametrize("call", ["ftruncate", "write"])
def test_one_that_cannot_be_written_names_its_file_and_is_free(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        with pytest.raises(OSError, match="Read-only") as raised:
            Claim(tmp_path / "a").take()
    assert raised.value.filename == f"{tmp_path / 'a'}"
    claim = Claim(tmp_path / "a")
    assert (
        claim.take() is not None
    )  # flock is of each opening: one that was left open would keep it
    claim.release()
