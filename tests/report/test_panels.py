"""What a page shows of the answers of a run, and what it believes of a file."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest

from flambeau.report import panels
from flambeau.report.confusion_panel import confusion
from flambeau.report.evaluated import Evaluated, evaluated
from flambeau.report.page import report_page
from flambeau.report.reported_run import ReportedRun, Series
from flambeau.report.words import CHINESE, ENGLISH

PICTURE = "data:image/png;base64,iVBORw0K"


def stored(num: int = 3) -> dict[str, Any]:
    sample = {
        "index": 4, "image": "photos/val/a.jpg", "label": 0, "predicted": 1, "probability": 0.75,
        "of_label": 0.25, "picture": PICTURE,
    }  # fmt: skip
    return {
        "step": 12, "images": 10, "classes": [f"class {k}" for k in range(num)],
        "labels": [4, 6, *[0] * (num - 2)], "predicted": [5, 5, *[0] * (num - 2)],
        "right": [3, 4, *[0] * (num - 2)], "confused": [[1, 0, 2], [0, 1, 1]],
        "calibration": [[7, 4.0, 0.5, 0.25], [14, 6.0, 0.95, 1.0]], "calibration_error": 0.13,
        "mistakes": [sample], "unsure": [],
    }  # fmt: skip


def whole(num: int = 3) -> Evaluated:
    found = evaluated(stored(num))
    assert found is not None
    return found


@pytest.mark.parametrize(
    "change",
    [
        lambda f: f.pop("labels"),
        lambda f: f.update(labels=[1, 2]),
        lambda f: f.update(right=[1, 2, "3"]),
        lambda f: f.update(right=[1, 2, -3]),
        lambda f: f.update(right=[1, 2, True]),
        lambda f: f.update(right=[1, 2, 10**400]),
        lambda f: f.update(classes=[1, 2, 3]),
        lambda f: f.update(confused=[[0, 3, 1]]),
        lambda f: f.update(confused=[[0, 1]]),
        lambda f: f.update(confused={}),
        lambda f: f.update(calibration=[[0, 1, 2.0, 0.5]]),
        lambda f: f.update(calibration=[[0, 1, float("nan"), 0.5]]),
        lambda f: f.update(calibration=[[0, 1, 0.5, 0.5]] * 16),
        lambda f: f.update(calibration_error=None),
        lambda f: f.update(mistakes=f["mistakes"] * 51),
        lambda f: f["mistakes"][0].update(label=7),
        lambda f: f["mistakes"][0].update(image=None),
        lambda f: f.update(mistakes=["x"]),
        lambda f: f.update(step="1"),
        lambda f: f.update(suspects=None),
        lambda f: f.update(suspects=[{}]),
        lambda f: f.update(findings=[["title", "line"]]),
        lambda f: f.update(findings=[["title", []]] * 21),
    ],
)
def test_what_no_run_writes_is_not_believed(change: Callable[[dict[str, Any]], object]) -> None:
    found = stored()
    assert evaluated(found) is not None
    change(found)
    assert evaluated(found) is None
    assert evaluated([found]) is None


@pytest.mark.parametrize(
    "picture",
    ["http://example.com/a.jpg", "data:text/html;base64,AAAA", "data:image/svg+xml;base64,AAAA",
     'data:image/png;base64,AA"AA', "data:image/png;base64," + "A" * 60_001, 7],
)  # fmt: skip
def test_a_picture_that_is_none_is_left_out(picture: object) -> None:
    found = stored()
    found["mistakes"][0]["picture"] = picture
    answers = evaluated(found)
    assert answers is not None and answers.mistakes[0].picture is None
    assert "<img" not in panels.pictures(answers, ENGLISH)


def test_a_mistake_is_shown_with_both_classes_and_the_end_of_its_path() -> None:
    text = panels.pictures(whole(), ENGLISH)
    assert f'src="{PICTURE}"' in text
    assert "class 1 75.0%; label: class 0 25.0%" in text
    assert ">val/a.jpg<" in text and "photos" not in text
    assert ENGLISH["unsure"] not in text  # there is none


def test_names_of_wide_characters_have_room_beside_the_matrix() -> None:
    found = stored(2) | {"classes": ["这是一个名称很长的中文类别", "短名"]}
    believed = evaluated(found)
    assert believed is not None
    page = confusion(believed, CHINESE)
    assert ">这是一个名称…</text>" in page  # 13 columns of 14
    assert 'width="156"' in page  # 13 columns of 8 px, two cells, and margins
    assert ">短名</text>" in page


def test_every_count_stands_in_the_matrix() -> None:
    text = confusion(whole(), ENGLISH)
    titles = re.findall(r"<title>(.*?)</title><rect class=\"(\w+)\"", text)
    assert titles == [
        ("class 0 → class 0: 3", "right"), ("class 0 → class 1: 1", "wrong"),
        ("class 1 → class 0: 2", "wrong"), ("class 1 → class 1: 4", "right"),
    ]  # fmt: skip
    assert re.findall(r"fill-opacity=\"([^\"]+)", text)[0] == "0.77"  # 0.08 + 0.92 * 3 / 4


def test_of_many_classes_the_pairs_are_listed() -> None:
    text = confusion(whole(41), ENGLISH)
    assert "<svg" not in text
    assert re.findall(r"<td[^>]*>(.*?)</td>", text) == [
        "class 0",
        "2",
        "33.3%",
        "class 1",
        "1",
        "25.0%",
    ]


def test_the_classes_are_sorted_by_what_they_need() -> None:
    rows = re.findall(
        r"<tr><th scope=\"row\">(.*?)</th>(.*?)</tr>", panels.classes(whole(), ENGLISH)
    )
    figures = {name: re.findall(r">([^<]+)</td>", cells) for name, cells in rows}
    assert figures == {
        "class 0": ["4", "75.0%", "60.0%", "66.7%"], "class 1": ["6", "66.7%", "80.0%", "72.7%"],
        "class 2": ["0", "-", "-", "-"],
    }  # fmt: skip
    assert [name for name, _ in rows] == ["class 0", "class 1", "class 2"]


def test_calibration_has_a_point_for_each_bin() -> None:
    text = panels.calibration(whole(), ENGLISH)
    assert "error: 13.0%" in text
    assert "4 images: confidence 50.0%, right 25.0%" in text
    assert text.count("<circle") == 2


@pytest.mark.parametrize(
    ("wait", "said"), [(0.0, "fast_data"), (0.1, "some_waiting"), (0.5, "slow_data")]
)
def test_the_verdict_follows_the_time_that_was_waited(wait: float, said: str) -> None:
    speed = Series((1, 2), (), (90.0, None))
    series = {"images_per_s": speed, "data_wait": Series((1, 2), (), (wait, None))}
    run = ReportedRun("a", "finished", series=series)
    for words in (ENGLISH, CHINESE):
        text = panels.timing(run, words)
        assert words[said].format(share=f"{wait:.0%}", samples="90") in text
        assert words["pack_helps"] not in text
        command = dataclasses.replace(run, facts={"model": "resnet18"})
        assert (words["pack_helps"] in panels.timing(command, words)) == (wait > 0.05)
    assert panels.timing(ReportedRun("a", "finished"), ENGLISH) == ""


def test_a_slow_stretch_counts_for_the_time_that_it_took() -> None:
    steps = (10, 20, 40)  # 1 s, 9 s and 2 s with batches of 9 images
    series = {
        "images_per_s": Series(steps, (), (90.0, 10.0, 90.0)),
        "data_wait": Series(steps, (), (0.0, 1.0, 0.0)),
    }
    text = panels.timing(ReportedRun("a", "finished", series=series), ENGLISH)
    assert "waits for data 75% of its time, at 30 samples per second" in text  # 360 images in 12 s


@pytest.mark.parametrize("model", [{"parameters": "9"}, {"parameters": 9, "trained": None}, {}])
def test_a_model_that_no_run_tells_of(model: dict[str, Any]) -> None:
    assert panels.model(ReportedRun("a", "finished", model=model), ENGLISH) == ""


def test_findings_of_the_data_check_are_listed() -> None:
    found = evaluated({**stored(), "findings": [["The classes are uneven", ["a: 9", "b: 1"]]]})
    assert found is not None
    text = panels.findings(found, ENGLISH)
    assert "<li>The classes are uneven<br>a: 9<br>b: 1</li>" in text


def test_a_run_without_figures_says_so() -> None:
    page = report_page([ReportedRun("a", "stopped")], words=ENGLISH, version="1")
    section = page.partition('<h2 id="h-figures">')[2].partition("</section>")[0]
    assert ENGLISH["nothing"] in section and "<table" not in section
