"""events.jsonl: a line for each event, an end to the file, and no harm where it cannot be written."""

import json
from pathlib import Path

import pytest

from flambeau.run.folder import events_log
from flambeau.run.folder.events_log import EventsLog, note_lost_rank


def test_a_line_for_each_event(tmp_path: Path) -> None:
    steps = iter([0, 12])
    log = EventsLog(tmp_path / "events.jsonl", lambda: next(steps), clock=lambda: 1.5)
    log.add("the run starts")
    log.add("odd \u2028\ud800", peak_memory_bytes=7)
    lines = (tmp_path / "events.jsonl").read_bytes().split(b"\n")[:-1]
    assert [json.loads(line) for line in lines] == [
        {"time": "1970-01-01T00:00:01Z", "step": 0, "text": "the run starts"},
        {
            "time": "1970-01-01T00:00:01Z", "step": 12, "text": "odd \u2028?",
            "peak_memory_bytes": 7,
        },
    ]  # fmt: skip


def test_the_file_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_log, "_MAX_BYTES", 100)
    log = EventsLog(tmp_path / "events.jsonl", lambda: 0)
    for _ in range(10):
        log.add("x" * 50)
    assert 100 <= (tmp_path / "events.jsonl").stat().st_size < 300


def test_what_cannot_be_written_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").mkdir()
    EventsLog(tmp_path / "events.jsonl", lambda: 0).add("x")
    EventsLog(tmp_path / "absent" / "events.jsonl", lambda: 0).add("x")
    assert not (tmp_path / "absent").exists()


@pytest.mark.parametrize(
    ("metrics", "step"),
    [
        (None, 0),
        ("", 0),
        ('{"step": 7}\n{"step": 12, "x": 1}\n{"st', 12),
        ('[1]\n{"step": true}\n', 0),
    ],
)
def test_a_lost_process_is_noted_from_outside(
    tmp_path: Path, metrics: str | None, step: int
) -> None:
    if metrics is not None:
        (tmp_path / "metrics.jsonl").write_text(metrics)
    note_lost_rank(tmp_path, "rank 1 of 2 (host h, process 5) was killed by SIGKILL")
    (row,) = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert row["step"] == step
    assert row["text"] == "lost: rank 1 of 2 (host h, process 5) was killed by SIGKILL"
