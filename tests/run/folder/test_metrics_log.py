"""The running CRC-32 of metrics.jsonl is that of the file, through cuts and new starts."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from flambeau.run.folder.metrics_log import MetricsLog, crc32_of


def test_the_crc_is_that_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, keep_bytes=0)
    places = [(log.size, log.crc32)]
    for step in range(3):
        log.write({"step": step, "loss": float("nan")})
        places.append((log.size, log.crc32))
    assert [crc32_of(path, size) for size, _ in places] == [crc for _, crc in places]
    assert log.size == path.stat().st_size

    log.cut(places[1][0])
    assert (log.size, log.crc32) == places[1]
    log.write({"step": 1, "loss": float("nan")})
    assert (log.size, log.crc32) == places[2]
    log.close()

    again = MetricsLog(path, keep_bytes=places[1][0])
    assert (again.size, again.crc32) == places[1]
    again.close()
    path.write_bytes(b"")
    short = MetricsLog(path, keep_bytes=places[1][0])
    assert (short.size, short.crc32, short.missing_bytes) == (0, 0, places[1][0])
    short.close()


@pytest.mark.parametrize(
    ("call", "work"),
    [
        ("ftruncate", lambda log: log.cut(0)),
        ("write", lambda log: log.write({"step": 1})),
        ("fsync", lambda log: log.sync()),
    ],
)
def test_a_disk_that_fails_is_told_with_the_file(
    call: str, work: Callable[[MetricsLog], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> int:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    log = MetricsLog(tmp_path / "metrics.jsonl", keep_bytes=0)
    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        with pytest.raises(OSError, match="quota") as raised:
            work(log)
    log.close()
    assert raised.value.filename == f"{tmp_path / 'metrics.jsonl'}"
