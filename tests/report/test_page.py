"""The file itself: nothing from outside, and no text of a run does anything."""

import base64
import hashlib
import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from flambeau.report.evaluated import Evaluated, Sample
from flambeau.report.page import ASSETS, report_page
from flambeau.report.reported_run import Event, ReportedRun, Series
from flambeau.report.words import CHINESE, ENGLISH

OWNED = "document.documentElement.dataset.owned=1"
XSS = [
    f"<script>{OWNED}</script>",
    f"</script><script>{OWNED}</script>",
    f"<img src=x onerror={OWNED}>",
    f'"><img src=x onerror={OWNED}>',
    f"'><svg onload={OWNED}>",
    f"<svg/onload={OWNED}>",
    f"<body onload={OWNED}>",
    f"<iframe srcdoc='<script>{OWNED}</script>'>",
    f"javascript:{OWNED}",
    f"<a href='javascript:{OWNED}'>x</a>",
    f"<details open ontoggle={OWNED}>",
    "<!--",
    "-->",
    "]]>",
    f"<style>@import 'http://example.com'</style><script>{OWNED}</script>",
    f"<ScRiPt>{OWNED}</ScRiPt>",
    f"<math><mtext></mtext><script>{OWNED}</script></math>",
    f"<input autofocus onfocus={OWNED}>",
    f"<video><source onerror={OWNED}></video>",
    f"<marquee onstart={OWNED}>",
    f"<object data=javascript:{OWNED}>",
    "&lt;script&gt;",
    f"&#60;script&#62;{OWNED}",
    f"\\u003cscript>{OWNED}",
    f"\u2028{OWNED}",
    f"\0{OWNED}",
    f"`${{{OWNED}}}`",
    f"';{OWNED}//",
    f'";{OWNED}//',
    f'\\";{OWNED}//',
    f"</title><script>{OWNED}</script>",
    f"</style><script>{OWNED}</script>",
    f"</noscript><script>{OWNED}</script>",
    f"</td><script>{OWNED}</script>",
    f"<link rel=stylesheet href=//example.com onload={OWNED}>",
    f"<base href=javascript:{OWNED}//>",
    f"<meta http-equiv=refresh content='0;javascript:{OWNED}'>",
    f"<form action=javascript:{OWNED}><button>",
    f"<isindex type=image src=1 onerror={OWNED}>",
    f"<table background=javascript:{OWNED}>",
    f"on=1 {OWNED} x='",
    f"{{{{constructor.constructor('{OWNED}')()}}}}",
    f"<x onclick={OWNED} style=position:fixed;inset:0>",
    f"<img src=x:x onerror\n={OWNED}>",
    f"<<script>{OWNED}//<</script>",
    f"%3Cscript%3E{OWNED}",
    "__proto__",
    f"<template><script>{OWNED}</script></template>",
    f"<plaintext>{OWNED}",
    f"<textarea><script>{OWNED}</script>",
    f"<noembed><img title='</noembed><img src onerror={OWNED}>'>",
]


def hostile(number: int, text: str) -> ReportedRun:
    series = {
        text: Series((1, 2), (0.5, 1.0), (1.0, None)),
        "val_loss": Series((2,), (1.0,), (0.5,)),
    }
    sample = Sample(f"folder/{text}", 0, 1, 0.9, 0.1, "data:image/jpeg;base64,AAAA")
    answers = Evaluated(
        step=2, classes=[text, f"{text} {text}"], labels=[3, 1], predicted=[2, 2], right=[2, 1],
        confused=[(0, 1, 1)], calibration=[(14, 4, 0.9, 0.75)], calibration_error=0.15,
        mistakes=[sample], unsure=[sample], suspects=[sample], findings=[(text, [text])],
    )  # fmt: skip
    return ReportedRun(
        f"{text} {number}", text, why=text, facts={text: text}, settings={text: text, "seed": number},
        environment={text: {text: [text]}}, data={text: text}, figures={text: 0.5}, series=series,
        model={"class": text, "parameters": 9, "trained": 8, "parts": [[text, text, 9, 8]]},
        events=[Event(text, text, text)], evaluated=answers, bad_images=(2, (text,)),
    )  # fmt: skip


class Tags(HTMLParser):
    """Elements and attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def page_of(*runs: ReportedRun, words: dict[str, str] = ENGLISH) -> str:
    return report_page(runs, words=words, version="1.2.3")


def test_there_are_fifty_and_none_makes_an_element() -> None:
    assert len(XSS) == len(set(XSS)) >= 50
    harmless = [f"text {number}" for number in range(len(XSS))]

    def tags(texts: list[str]) -> list[tuple[str, dict[str, str | None]]]:
        runs = [hostile(number, text) for number, text in enumerate(texts)]
        pages = [page_of(*runs), *(page_of(run) for run in runs)]
        return [tag for page in pages for tag in Tags(page).found]

    ours, theirs = tags(harmless), tags(XSS)
    assert [tag for tag, _ in theirs] == [tag for tag, _ in ours]
    assert [set(attributes) for _, attributes in theirs] == [set(a) for _, a in ours]
    assert not any(name.startswith("on") for _, attributes in theirs for name in attributes)


@pytest.mark.parametrize("watch_s", [None, 5])
def test_the_policy_lets_in_these_scripts_and_this_style_alone(watch_s: int | None) -> None:
    page = report_page([hostile(0, "a")], words=ENGLISH, version="1.2.3", watch_s=watch_s)
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]+)"', page)
    for name, tag in (("script", "<script>(.*?)</script>"), ("style", "<style>(.*?)</style>")):
        texts = re.findall(tag, page, re.DOTALL)
        digests = [hashlib.sha256(text.encode()).digest() for text in texts]
        known = " ".join(f"'sha256-{base64.b64encode(one).decode()}'" for one in digests)
        assert f"{name}-src {known};" in policy
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    assert ("connect-src" in policy) == ("fetch(" in page) == (watch_s is not None)


def test_nothing_comes_from_elsewhere() -> None:
    page = page_of(hostile(0, "a"), hostile(1, "b"))
    assert set(re.findall(r"https?://[^\"'\s)<]+", page)) == {"http://www.w3.org/2000/svg"}
    assert not [a for _, a in Tags(page).found if {"src", "srcset", "action", "data"} & a.keys()]
    images = [a["src"] for t, a in Tags(page_of(hostile(0, "a"))).found if "src" in a]
    assert len(images) == 3 and all(one and one.startswith("data:image/") for one in images)
    assert all(a["href"] and a["href"].startswith("#") for t, a in Tags(page).found if t == "a")
    script = (ASSETS / "report.js").read_text(encoding="utf-8")
    assert len(script) <= 30_000
    assert not re.search(
        r"\b(fetch|XMLHttpRequest|WebSocket|import|eval|innerHTML|Function)\b", script
    )


def test_what_the_script_reads_is_what_the_runs_have() -> None:
    page = page_of(hostile(0, "</script>"))
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page)
    found = json.loads(text)
    assert [chart["title"] for chart in found["charts"]] == ["loss", "</script>"]
    assert found["charts"][1]["lines"][0]["values"] == [1.0, None]
    assert page.count("<figure ") == 2
    assert found["watch"] is None


def test_settings_that_differ_come_first() -> None:
    runs = [
        ReportedRun(name, "finished", settings={"lr": lr, "model": "resnet18", "seed": 0})
        for name, lr in (("a", 0.1), ("b", 0.2))
    ]
    page = page_of(*runs)
    before, _, after = page.partition("<details>")
    assert ENGLISH["differ"] in before
    differ = before.rpartition("<h3>")[2]
    assert ">lr<" in differ
    assert ">model<" not in differ
    assert ">model<" in after
    assert '<tr class="differs"><th scope="row">lr<' in after
    assert "<details>" not in page_of(runs[0])


def test_sections_without_a_row_say_so() -> None:
    page = page_of(ReportedRun("a", "foreign"))
    for name in ("settings", "data", "environment"):
        section = page.partition(f'<h2 id="h-{name}">')[2].partition("</section>")[0]
        assert ENGLISH["nothing"] in section and "<table" not in section


def test_both_languages_have_the_same_words() -> None:
    assert ENGLISH.keys() == CHINESE.keys()
    page = page_of(hostile(0, "a"), words=CHINESE)
    assert '<html lang="zh">' in page
    assert "曲线" in page


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def in_a_browser(folder: Path, page: str, script: str, *, budget_ms: int = 0) -> str:
    """The elements of a page after a script in it has run."""
    assert CHROMIUM is not None
    page, changed = re.subn(r"<meta http-equiv=[^>]*>", "", page)  # which lets no other script run
    assert changed == 1
    file = folder / "report.html"
    file.write_text(page.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
    flags = f"--headless --no-sandbox --disable-gpu --user-data-dir={folder / 'user'} --dump-dom"
    if budget_ms:
        flags += f" --virtual-time-budget={budget_ms}"
    done = subprocess.run(
        [CHROMIUM, *flags.split(), f"file://{file}"],
        check=True, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    return done.stdout


def simple(
    name: str, values: tuple[float | None, ...], *, seed: int = 0, epochs: bool = True
) -> ReportedRun:
    steps = tuple(range(1, len(values) + 1))
    series = Series(steps, tuple(map(float, steps)) if epochs else (), values)
    return ReportedRun(name, "finished", settings={"seed": seed}, series={"train_loss": series})


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")
@pytest.mark.parametrize(("key", "seen"), [("ArrowLeft", "step 2"), ("ArrowRight", "step 3")])
def test_arrow_keys_reach_points_that_are_far_apart(tmp_path: Path, key: str, seen: str) -> None:
    press = f"""
    const svg = document.querySelector("figure > svg");
    svg.dispatchEvent(new KeyboardEvent("keydown", {{key: "{key}"}}));
    """
    found = in_a_browser(tmp_path, page_of(simple("a", (1.0, 2.0, 3.0))), press)
    assert f'<div class="readout">{seen}<ul>' in found


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")
@pytest.mark.parametrize("value", [1.0, 1e-320, 0.1, -1e299])
def test_values_that_differ_in_the_last_bit_are_drawn(tmp_path: Path, value: float) -> None:
    """Ticks so close together would never come to their end."""
    page = page_of(simple("a", (value, math.nextafter(value, math.inf))))
    assert 'stroke-width="1.6"' in in_a_browser(tmp_path, page, "")


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")
def test_the_mean_over_seeds_is_smoothed_and_so_is_its_band(tmp_path: Path) -> None:
    runs = simple("a", (1.0, 3.0)), simple("b", (3.0, 9.0), seed=1)
    slide = """
    const slider = document.getElementById("smooth");
    slider.value = 0.5;
    slider.dispatchEvent(new Event("input"));
    """
    found = in_a_browser(tmp_path, page_of(*runs), slide)
    # (0.5 * 0.5 * first + 0.5 * last) / 0.75
    assert "a, n = 2: 4.667 (2.333 ... 7)</li>" in found


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")
def test_a_name_is_switched_off_with_all_of_its_runs(tmp_path: Path) -> None:
    runs = simple("a", (1.0, 2.0)), simple("b", (1.0, 2.0, 3.0), seed=1)
    found = in_a_browser(tmp_path, page_of(*runs), 'document.querySelector("[data-run]").click();')
    assert ENGLISH["nothing"] in found.partition("<main>")[2].partition('id="h-figures"')[0]


def test_epochs_are_offered_where_all_runs_know_them() -> None:
    known, unknown = simple("a", (1.0, 2.0)), simple("b", (1.0,), epochs=False)
    assert '<option value="epoch">' in page_of(known)
    assert '<option value="epoch">' not in page_of(known, unknown)  # a step is no epoch


def test_a_last_value_that_is_not_finite_is_told() -> None:
    assert '<td class="number">not finite (last)</td>' in page_of(simple("a", (1.0, None)))
    assert '<td class="number">1 (last)</td>' in page_of(simple("a", (None, 1.0)))


def test_columns_of_a_figure_and_of_its_curve_are_told_apart() -> None:
    series = {"val_loss": Series((1,), (), (0.5,))}
    runs = [ReportedRun(n, "finished", figures={"val_loss": 0.4}, series=series) for n in "ab"]
    head = page_of(*runs).partition("<thead>")[2].partition("</thead>")[0]
    assert re.findall(r"val_loss[^<]*", head) == ["val_loss", "val_loss (last)"]
    assert page_of(*runs).count('data-value="0.5">0.5 <svg ') == 2


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")
def test_a_browser_draws_it_and_runs_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(page_of(*(hostile(k, text) for k, text in enumerate(XSS))), encoding="utf-8")
    log = tmp_path / "net.json"
    assert CHROMIUM is not None
    done = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'user'}",
            "--disable-background-networking", f"--log-net-log={log}", "--virtual-time-budget=3000",
            "--dump-dom", f"file://{file}",
        ],
        check=False, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "data-owned" not in done.stdout.partition("<body>")[0]
    drawn = re.findall(r"<figure [^>]*>.*?</figure>", done.stdout, re.DOTALL)
    assert len(drawn) == len(XSS) + 1
    assert all("<path d=" in figure for figure in drawn)
    asked = re.findall(r'"url":"(https?://[^"]+)"', log.read_text(encoding="utf-8"))
    assert [url for url in asked if "example.com" in url] == []


def axe() -> str:
    """Deque's axe-core, which looks for what keeps people out."""
    package = pytest.importorskip("axe_core_python")
    return (Path(package.__file__).parent / "axe.min.js").read_text(encoding="utf-8")


_RUN_AXE = """;axe.run(document).then((found) => {
  const told = document.createElement("pre");
  told.id = "axe";
  told.textContent = JSON.stringify([found.passes.length, found.violations.map((one) => one.id)]);
  document.body.append(told);
});"""


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")
@pytest.mark.parametrize(
    ("runs", "words", "planted", "violations"),
    [
        ([hostile(0, "a")], ENGLISH, "", []),
        ([hostile(0, "a"), hostile(1, "b")], CHINESE, "", []),
        ([hostile(0, "a")], ENGLISH, "<img src='data:,'>", ["image-alt"]),
    ],
    ids=["one", "two in Chinese", "an image without a text"],
)
def test_axe_finds_nothing(
    tmp_path: Path,
    runs: list[ReportedRun],
    words: dict[str, str],
    planted: str,
    violations: list[str],
) -> None:
    page = page_of(*runs, words=words).replace("</main>", f"{planted}</main>")
    found = in_a_browser(tmp_path, page, axe() + _RUN_AXE, budget_ms=20_000)
    (told,) = re.findall(r'<pre id="axe">(.*?)</pre>', found)
    passes, broken = json.loads(told)
    assert broken == violations
    assert passes > 15


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")
def test_a_page_that_is_watched_puts_in_what_is_new(tmp_path: Path) -> None:
    pages = [
        report_page([simple("a", values)], words=ENGLISH, version="1", watch_s=1)
        for values in ((1.0, 2.0), (1.0, 2.0, 8.0))
    ]
    answer = json.dumps(pages[1]).replace("<", "\\u003c")
    script = f"window.fetch = async () => new Response({answer}, {{status: 200}});"
    found = in_a_browser(tmp_path, pages[0], script, budget_ms=3_000)
    assert '<div class="readout">step 3<ul>' in found
    assert ">8 (last)<" in found
