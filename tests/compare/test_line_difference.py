"""Lines of metrics.jsonl side by side."""

import json
from pathlib import Path
from typing import Any

import pytest

from flambeau.compare.line_difference import MetricLines, compare_lines, markdown_table
from flambeau.errors import InputError


def row(step: int, loss: float | None, **more: Any) -> dict[str, Any]:
    return {"step": step, "epoch": 0, "train_loss": loss, "images_per_s": 10.0 * step, **more}


def compared(tmp_path: Path, left: list[Any], right: list[Any]) -> MetricLines:
    for name, rows in (("left", left), ("right", right)):
        text = "".join(f"{json.dumps(r) if isinstance(r, dict) else r}\n" for r in rows)
        (tmp_path / name).write_text(text)
    return compare_lines(tmp_path / "left", tmp_path / "right")


def test_identical_for_n_steps_and_the_first_difference(tmp_path: Path) -> None:
    left = [row(5, 1.5), row(10, 1.25), {"step": 10, "val_loss": 2.0}, row(15, 1.0)]
    same = compared(tmp_path, left, left)
    assert (same.identical_steps, same.num_figures, same.is_same) == (15, 4, True)
    right = [left[0], left[1], {"step": 10, "val_loss": 2.5}, row(15, 1.0)]
    found = compared(tmp_path, left, right)
    assert (found.identical_steps, found.is_same) == (5, False)
    assert found.first is not None
    assert (found.first.step, found.first.name, found.first.change) == (10, "val_loss", 0.5)
    table = markdown_table(found, ("a", "b"))
    assert table.startswith(
        "**First difference at step 10**: val\\_loss 2.0 and 2.5 (+0.5); identical for 5 steps before"
    )
    assert "| train\\_loss, step 15 | 1.0 | 1.0 | same |" in table


def test_windows_that_differ_are_not_compared(tmp_path: Path) -> None:
    left = [row(5, 1.0), row(10, 2.0), {"step": 10, "val_loss": 1.0}]
    right = [row(10, 1.5), {"step": 10, "val_loss": 1.0}]
    found = compared(tmp_path, left, right)
    # The evaluation is the second line of its step in both.
    assert (found.num_figures, found.identical_steps, found.first) == (1, 10, None)


def test_a_run_that_is_shorter_is_not_the_same(tmp_path: Path) -> None:
    found = compared(tmp_path, [row(5, 1.0)], [row(5, 1.0), row(10, 1.0)])
    assert (found.identical_steps, found.steps, found.is_same) == (5, (5, 10), False)
    assert "the runs end at steps 5 and 10" in markdown_table(found, ("a", "b"))


def test_nan_equals_nan_and_rollbacks_are_kept(tmp_path: Path) -> None:
    back = {"step": 5, "epoch": 0, "rollback": 1, "bad_step": 7, "lr_scale": 0.5}
    found = compared(tmp_path, [row(5, None), back], [row(5, None)])
    assert (found.first, found.identical_steps) == (None, 5)
    assert [line["bad_step"] for line in found.rollbacks[0]] == [7]


@pytest.mark.parametrize(
    "odd",
    ['{"step": 9, "train_', "[" * 100_000, '{"step": true}', '{"step": 1e99}', '{"step": -4}', "\x00",
     '{"step": ' + "9" * 5000 + "}", '{"step": 5, "train_loss": 1' + "0" * 400 + ', "images_per_s": 1}'],
)  # fmt: skip
def test_lines_that_no_run_writes_are_left_out(tmp_path: Path, odd: str) -> None:
    found = compared(tmp_path, [odd, row(20, 1.0)], [odd, row(20, 1.0)])
    assert found.first is None
    markdown_table(found, ("a", "b"))


def test_names_out_of_a_file_are_no_markup(tmp_path: Path) -> None:
    name = "a|b<img src=x>\n[x](http://y)"
    found = compared(tmp_path, [row(5, 1.0, **{name: 1})], [row(5, 1.0, **{name: 2})])
    table = markdown_table(found, ("`a`\n", "b"))
    assert "<img" not in table.replace("\\<img", "")
    assert len(table.splitlines()) == 2 + 2 + 2 + 1


def test_a_folder_in_the_place_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "left").mkdir()
    (tmp_path / "right").write_text("")
    with pytest.raises(InputError, match="is not a file"):
        compare_lines(tmp_path / "left", tmp_path / "right")
