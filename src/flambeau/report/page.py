"""The report as one HTML file that loads nothing; all text from a run is escaped."""

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flambeau.report import panels, target_panels
from flambeau.report.evaluated import Evaluated
from flambeau.report.markup import escaped, frame, heading, row
from flambeau.report.reported_run import Chart, ReportedRun, Series, charts, seed_groups, thinned
from flambeau.report.slices_panel import slices
from flambeau.report.svg import element
from flambeau.report.sweep_panels import ReportedSweep, bands, folds, importance

ASSETS = Path(__file__).parent / "assets"
GENERATOR = "flambeau report"  # a tag in the head, by which our file is recognized
_SPARK = (90, 22)  # width and height of a small curve, px


def report_page(
    runs: Sequence[ReportedRun],
    *,
    words: Mapping[str, str],
    version: str,
    watch_s: int | None = None,
    sweep: ReportedSweep | None = None,
) -> str:
    """A report of one run or of several.

    Args:
        runs: at least one.
        words: from `flambeau.report.words`.
        version: of flambeau.
        watch_s: seconds between a served page's reloads; None for a file.
    """
    files = ["report.js"] if watch_s is None else ["report.js", "watch.js"]
    scripts = [(ASSETS / name).read_text(encoding="utf-8") for name in files]
    drawn = charts(runs)
    title = runs[0].name
    if len(runs) > 1:
        title = f"{words['title']}: {len(runs)} {words['runs'].lower()}"
    contents = _sections(runs, drawn, words, sweep)
    names = [name for name, content in contents.items() if content]
    sections = [_section(name, words, contents[name]) for name in names]
    return f"""<!DOCTYPE html>
<html lang="{words["language"]}">
{page_head(title, scripts)}
<body>
<header>
<h1>{escaped(title)}</h1>
{_summary(runs, words, names)}
</header>
<main>
{"".join(sections)}
</main>
<footer class="soft"><p>{escaped(words["made"].format(version=version))}</p></footer>
<script type="application/json" id="data">{_embedded(_for_script(drawn, words, watch_s))}</script>
{"".join(f"<script>{script}</script>" for script in scripts)}
</body>
</html>
"""


def _sections(
    runs: Sequence[ReportedRun],
    drawn: Sequence[Chart],
    words: Mapping[str, str],
    sweep: ReportedSweep | None,
) -> dict[str, str]:
    """The content of each section in the order of the page; empty ones are left out."""
    one, answers = (runs[0], runs[0].evaluated) if len(runs) == 1 else (None, None)
    shown = {"runs": _runs_table(runs, words) if one is None else ""}
    shown["curves"] = (panels.timing(one, words) if one else "") + _curves(runs, drawn, words)
    shown["figures"] = _figures(runs, words)
    if answers is not None:
        if isinstance(answers, Evaluated):
            shown |= panels.sections(answers, words)
        else:
            shown |= target_panels.sections(answers, words)
    if one is not None:
        shown["first_batch"] = panels.first_batch(one, words) if one.first_batch else ""
        shown["events"] = panels.events(one, words) if one.events else ""
        shown["model"] = panels.model(one, words) if one.model else ""
    if sweep is not None:
        shown["bands"] = bands(sweep, runs, words)
        shown["fold_table"] = folds(sweep, runs, words)
        shown["importance"] = importance(sweep, words)
        shown["tested"] = f"<p>{escaped(sweep.test)}</p>" if sweep.test else ""
    shown["slices"] = slices(runs, differing(runs), words) if one is None else ""
    shown["settings"] = _settings(runs, words)
    checked = panels.findings(answers, words) if answers and answers.findings else ""
    shown["data"] = checked + _nested(runs, "data", words)
    shown["environment"] = _nested(runs, "environment", words)
    return shown


def page_head(title: str, scripts: Sequence[str]) -> str:
    """The head of a page, with a policy that allows only our style and these scripts.

    Args:
        scripts: sources; with a second one the page may fetch from its server.
    """
    style = (ASSETS / "report.css").read_text(encoding="utf-8")
    # watch.js fetches from the server.
    more = "; connect-src 'self'" if len(scripts) > 1 else ""
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {' '.join(map(_hash, scripts))}; "
        f"img-src data:; base-uri 'none'; form-action 'none'{more}"
    )
    return f"""<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="{GENERATOR}">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{escaped(title)}</title>
<style>{style}</style>
</head>"""


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _embedded(value: object) -> str:
    """JSON that cannot end its <script> tag."""
    return json.dumps(value, ensure_ascii=True, allow_nan=False).replace("<", "\\u003c")


def _section(name: str, words: Mapping[str, str], content: str) -> str:
    heading = f'<h2 id="h-{name}">{escaped(words[name])}</h2>'
    return f'<section aria-labelledby="h-{name}">{heading}\n{content}</section>\n'


def _summary(runs: Sequence[ReportedRun], words: Mapping[str, str], names: Sequence[str]) -> str:
    links = "".join(f'<a href="#h-{name}">{escaped(words[name])}</a>' for name in names)
    lines = [f'<nav aria-label="{escaped(words["title"])}">{links}</nav>']
    if len(runs) == 1:
        run = runs[0]
        state = words.get(f"state {run.state}", run.state)
        said = state if run.why is None else f"{state}: {run.why}"
        named = (
            f"{words.get(f'fact {label}', label)}: {text}" for label, text in run.facts.items()
        )
        facts = " · ".join([said, *named])
        lines.insert(0, f"<p>{escaped(facts)}</p>")
    return "\n".join(lines)


# ---------------------------------------------------------------- curves


def _for_script(
    drawn: Sequence[Chart], words: Mapping[str, str], watch_s: int | None
) -> dict[str, Any]:
    shown = ("nothing", "step", "epoch")
    return {
        "watch": watch_s,
        "words": {name: words[name] for name in shown},
        "charts": [_chart(chart) for chart in drawn],
    }


def _chart(chart: Chart) -> dict[str, Any]:
    lines = []
    for line in chart.lines:
        values = {
            "run": line.run,
            "name": line.name,
            "color": line.color,
            "dash": line.dash,
            "steps": line.series.steps,
            "epochs": line.series.epochs or None,
            "values": line.series.values,
        }
        if line.spread is not None:
            values["band"] = line.spread
            values["low"] = [None if pair is None else pair[0] for pair in line.spread]
            values["high"] = [None if pair is None else pair[1] for pair in line.spread]
        lines.append(values)
    return {"title": chart.title, "log": chart.may_be_log, "lines": lines}


def _curves(runs: Sequence[ReportedRun], drawn: Sequence[Chart], words: Mapping[str, str]) -> str:
    if not drawn:
        return f"<p>{escaped(words['no_curves'])}</p>"
    boxes = "".join(
        f'<label><input type="checkbox" checked data-run="{escaped(group[0].name)}">'
        f'<span class="swatch" data-color="{color}"></span>{escaped(_group_name(group))}</label>'
        for color, group in enumerate(seed_groups(runs))
    )
    has_epochs = all(series.epochs for run in runs for series in run.series.values())
    axes = "".join(
        f'<option value="{name}">{escaped(words[name])}</option>'
        for name in (["step", "epoch"] if has_epochs else ["step"])
    )
    figures = "".join(
        f'<figure id="chart-{number}"><h3>{escaped(chart.title)}</h3></figure>'
        for number, chart in enumerate(drawn)
    )
    seeds = any(line.spread is not None for chart in drawn for line in chart.lines)
    return f"""<noscript><p>{escaped(words["script"])}</p></noscript>
<div class="controls">{boxes if len(runs) > 1 else ""}
<label>{escaped(words["axis"])} <select id="axis">{axes}</select></label>
<label><input type="checkbox" id="log"> {escaped(words["log"])}</label>
<label>{escaped(words["smooth"])}
<input type="range" id="smooth" min="0" max="0.98" step="0.02" value="0"></label>
<span class="soft">{escaped(words["keys"])}</span></div>
{f'<p class="soft">{escaped(words["seeds"])}</p>' if seeds else ""}
<div class="charts">{figures}</div>
"""


def _group_name(group: Sequence[ReportedRun]) -> str:
    return group[0].name if len(group) == 1 else f"{group[0].name}, n = {len(group)}"


# ---------------------------------------------------------------- tables


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.5g}"


def _runs_table(runs: Sequence[ReportedRun], words: Mapping[str, str]) -> str:
    figures = list(dict.fromkeys(name for run in runs for name in run.figures))
    shown = [name for name in differing(runs) if name not in figures][:6]
    sparks = [
        name
        for name in ("val_loss", "val_accuracy", "train_loss")
        if any(name in run.series for run in runs)
    ][:2]
    head = [
        heading(words["name"], sorts=True),
        heading(words["state"], sorts=True),
        *(heading(name, number=True, sorts=True) for name in figures),
        *(heading(f"{name} ({words['last']})", number=True, sorts=True) for name in sparks),
        *(heading(name, sorts=True) for name in shown),
    ]
    rows = []
    for run in runs:
        name = escaped(run.name)
        if run.link is not None:
            name = f'<a href="{escaped(run.link)}">{name}</a>'
        state = words.get(f"state {run.state}", run.state)
        cells = [f'<th scope="row">{name}</th><td>{escaped(state)}</td>']
        for name in figures:
            cells.append(_cell(run.figures.get(name)))
        for name in sparks:
            cells.append(_spark_cell(run.series.get(name)))
        cells += [f"<td>{escaped(_value(run.settings.get(name, '')))}</td>" for name in shown]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    label = escaped(words["filter"])
    box = f'<p><label>{label} <input type="search" id="filter" autocomplete="off"></label></p>'
    return box + frame(head, rows, label=words["runs"], name="runs")


def _cell(value: float | None) -> str:
    known = "" if value is None else repr(float(value))
    return f'<td class="number" data-value="{known}">{_number(value)}</td>'


def _spark_cell(series: Series | None) -> str:
    """A small curve, and the last value, by which the table sorts."""
    values = () if series is None else thinned(series, 60).values
    known = [value for value in values if value is not None]
    if not known:
        return '<td class="number" data-value=""></td>'
    width, height = _SPARK
    low = min(known)
    high = max(known)
    right = max(1, len(known) - 1)
    scale = (height - 4) / ((high - low) or 1)
    points = " ".join(
        f"{1 + (width - 2) * k / right:.1f},{height - 2 - scale * (value - low):.1f}"
        for k, value in enumerate(known)
    )
    curve = element("polyline", points=points, fill="none", stroke="currentColor", stroke_width=1.3)
    picture = element(
        "svg",
        curve,
        width=width,
        height=height,
        role="img",
        aria_label=f"{_number(known[0])} ... {_number(known[-1])}",
    )
    return f'<td class="number" data-value="{known[-1]!r}">{_number(known[-1])} {picture}</td>'


def _figures(runs: Sequence[ReportedRun], words: Mapping[str, str]) -> str:
    names = list(dict.fromkeys(name for run in runs for name in (*run.figures, *run.series)))
    if not names:
        return f"<p>{escaped(words['nothing'])}</p>"
    head = [heading(words["name"]), *(heading(run.name, number=True) for run in runs)]
    rows = []
    for name in names:
        values = []
        for run in runs:
            shown = _number(run.figures.get(name))
            if not shown and name in run.series:
                last = run.series[name].values[-1]
                shown = words["not_finite"] if last is None else _number(last)
                shown = f"{shown} ({words['last']})"
            values.append(shown)
        rows.append(row(name, values, numbers=len(values)))
    return frame(head, rows, label=words["figures"])


def _value(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def differing(runs: Sequence[ReportedRun]) -> list[str]:
    """Settings that differ between the runs."""
    names = list(dict.fromkeys(name for run in runs for name in run.settings))
    return [name for name in names if len({_value(run.settings.get(name)) for run in runs}) > 1]


def _settings(runs: Sequence[ReportedRun], words: Mapping[str, str]) -> str:
    names = list(dict.fromkeys(name for run in runs for name in run.settings))
    if not names:
        return f"<p>{escaped(words['nothing'])}</p>"
    different = differing(runs)
    values = [{name: _value(value) for name, value in run.settings.items()} for run in runs]

    def table(chosen: Sequence[str]) -> str:
        marks = len(chosen) > len(different)
        return _side_by_side(runs, values, chosen, words, label=words["settings"], marks=marks)

    if not different:
        return table(names)
    return (
        f"<h3>{escaped(words['differ'])}</h3>{table(different)}"
        f"<details><summary>{escaped(words['all'])}</summary>{table(names)}</details>\n"
    )


def _flat(value: object, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{name} {key}".strip())
    else:
        yield name, _value(value)


def _nested(runs: Sequence[ReportedRun], what: str, words: Mapping[str, str]) -> str:
    flat = [dict(_flat(getattr(run, what))) if getattr(run, what) else {} for run in runs]
    names = list(dict.fromkeys(name for one in flat for name in one))
    if not names:
        return f"<p>{escaped(words['nothing'])}</p>"
    return _side_by_side(runs, flat, names, words, label=words[what])


def _side_by_side(
    runs: Sequence[ReportedRun],
    values: Sequence[Mapping[str, str]],
    names: Sequence[str],
    words: Mapping[str, str],
    *,
    label: str,
    marks: bool = True,
) -> str:
    """A table with a row per name and a column per run; rows that differ may be marked."""
    head = [heading(words["name"]), *(heading(run.name) for run in runs)]
    rows = []
    for name in names:
        cells = [one.get(name, "") for one in values]
        rows.append(row(name, cells, differs=marks and len(set(cells)) > 1))
    return frame(head, rows, label=label)
