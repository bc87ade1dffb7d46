"""The parts of a page that show one run: its predictions, events, data waits and model."""

import math
from collections.abc import Mapping, Sequence

from flambeau.report import svg
from flambeau.report.confusion_panel import confusion
from flambeau.report.evaluated import AnyEvaluated, Evaluated, Sample
from flambeau.report.markup import escaped, percent, table
from flambeau.report.reported_run import ReportedRun

_WORST = 100  # most classes in the table of classes
_PLOT = 240  # side of the diagram of calibration, px

Words = Mapping[str, str]


# ---------------------------------------------------------------- answers


def pictures(answers: Evaluated, words: Words) -> str:
    """The most confident mistakes, the least certain right predictions, and labels that look wrong."""
    parts = []
    kinds = {"mistakes": answers.mistakes, "unsure": answers.unsure, "suspects": answers.suspects}
    for kind, samples in kinds.items():
        if samples:
            shown = "".join(_picture(one, answers.classes, words) for one in samples)
            parts.append(f'<h3>{escaped(words[kind])}</h3><ul class="pictures">{shown}</ul>\n')
    return "".join(parts)


def _picture(sample: Sample, classes: Sequence[str], words: Words) -> str:
    label, predicted = classes[sample.label], classes[sample.predicted]
    said = f"{predicted} {sample.probability:.1%}" if sample.probability else predicted
    if sample.label != sample.predicted:
        said = f"{said}; {words['label']}: {label} {sample.of_label:.1%}"
    return picture_item(said, sample.image, sample.picture)


def picture_item(said: str, image: str, picture: str | None) -> str:
    """An image of a list: any picture, what is said of it, and where it lies."""
    shown = "" if picture is None else f'<img src="{picture}" alt="{escaped(said)}" loading="lazy">'
    *_, folder, name = ("", *image.split("/"))  # the part of the path that fits
    path = f"{folder}/{name}" if folder else name
    return f'<li>{shown}<span>{escaped(said)}</span><span class="soft">{escaped(path)}</span></li>'


def sections(answers: Evaluated, words: Words) -> dict[str, str]:
    """The content of each section about the answers."""
    return {
        "pictures": pictures(answers, words),
        "confusion": confusion(answers, words),
        "classes": classes(answers, words),
        "calibration": calibration(answers, words),
    }


def findings(answers: AnyEvaluated, words: Words) -> str:
    """The findings of the data check, in English."""
    items = "".join(
        f"<li>{escaped(title)}{''.join(f'<br>{escaped(line)}' for line in lines)}</li>"
        for title, lines in answers.findings
    )
    text = escaped(words["check_caption"])
    return f'<h3>{escaped(words["check"])}</h3><ul>{items}</ul><p class="soft">{text}</p>\n'


def classes(answers: Evaluated, words: Words) -> str:
    """Precision, recall and F1 of each class, the worst first."""
    rows = []
    for k, name in enumerate(answers.classes):
        of = answers.labels[k]
        said = answers.predicted[k]
        right = answers.right[k]
        f1 = 2 * right / (of + said) if of + said else math.nan
        text = "-" if math.isnan(f1) else f"{f1:.1%}"
        rows.append((f1, (name, of, percent(right, of), percent(right, said), text)))
    rows.sort(key=lambda row: (math.isnan(row[0]), row[0]))
    heads = (words["class"], words["images"], words["recall"], words["precision"], "F1")
    many = words["worst"].format(shown=_WORST, all=len(rows)) if len(rows) > _WORST else ""
    return table(heads, (cells for _, cells in rows[:_WORST]), numbers=4, caption=many)


def calibration(answers: Evaluated, words: Words) -> str:
    """The diagram of calibration: accuracy against confidence."""
    low = 34
    high = _PLOT - 10
    scale = high - low

    def x(share: float) -> float:
        return low + scale * min(1.0, share)

    def y(share: float) -> float:
        return high - scale * min(1.0, share) + 4

    most = max((num for _, num, _, _ in answers.calibration), default=1)
    parts = [svg.element("line", class_="grid", x1=x(0), y1=y(0), x2=x(1), y2=y(1))]
    for share in (0.0, 0.5, 1.0):
        parts.append(svg.label(low - 6, y(share) + 4, f"{share:g}", text_anchor="end"))
        parts.append(svg.label(x(share), _PLOT + 14, f"{share:g}", text_anchor="middle"))
    for _, num, confidence, right in answers.calibration:
        size = 2 + 7 * math.sqrt(num / most)
        said = words["bin"].format(images=num, confidence=f"{confidence:.1%}", right=f"{right:.1%}")
        point = svg.element("circle", class_="point", cx=x(confidence), cy=y(right), r=size)
        parts.append(svg.titled(said, point))
    label = words["calibration_caption"].format(error=f"{answers.calibration_error:.1%}")
    picture = svg.inline("plot", _PLOT + 10, _PLOT + 20, parts, label=label)
    return f"<p>{escaped(label)}</p>{picture}\n"


# ---------------------------------------------------------------- the run itself


def first_batch(run: ReportedRun, words: Words) -> str:
    """Training images after augmentation."""
    text = escaped(words["first_batch_caption"])
    return f'<img class="sheet" src="{run.first_batch}" alt="{text}"><p class="soft">{text}</p>\n'


def timing(run: ReportedRun, words: Words) -> str:
    """A sentence on how long the loop waited for data; empty without that figure."""
    speed, wait = run.series.get("images_per_s"), run.series.get("data_wait")
    if speed is None or wait is None:
        return ""
    shares = dict(zip(wait.steps, wait.values, strict=True))
    before = 0
    steps = seconds = waited = 0.0  # seconds as for a batch of one image: its size cancels out
    for step, rate in zip(speed.steps, speed.values, strict=True):
        share_of_line, new, before = shares.get(step), step - before, step
        if rate and share_of_line is not None and new > 0:
            steps, seconds = steps + new, seconds + new / rate
            waited += share_of_line * new / rate
    if not seconds:
        return ""
    share = waited / seconds
    samples = steps / seconds
    verdict = "fast_data" if share < 0.05 else "some_waiting" if share < 0.2 else "slow_data"
    text = words[verdict].format(share=f"{share:.0%}", samples=f"{samples:,.0f}")
    if (
        verdict != "fast_data" and "model" in run.facts
    ):  # a run of the command, whose data are images
        text += f" {words['pack_helps']}"
    return f"<p>{escaped(text)}</p>\n"


def events(run: ReportedRun, words: Words) -> str:
    """The events of the run, and the images that it could not read."""
    rows = ((one.time.replace("T", " "), one.step, one.text) for one in run.events)
    parts = [table((words["time"], words["step"], words["event"]), rows, numbers=0)]
    number, names = run.bad_images
    if number:
        more = " ..." if number > len(names) else ""
        text = words["bad_images"].format(number=number)
        parts.append(f"<p>{escaped(text)}: {escaped(', '.join(names))}{more}</p>\n")
    return "".join(parts)


def model(run: ReportedRun, words: Words) -> str:
    """The class of the model, its parameters, and those of its modules."""
    model_facts = run.model
    total, trained, parts = (
        model_facts.get("parameters"),
        model_facts.get("trained"),
        model_facts.get("parts"),
    )
    if not isinstance(total, int) or not isinstance(trained, int):
        return ""
    said = words["model_caption"].format(
        name=model_facts.get("class", ""), total=f"{total:,}", trained=f"{trained:,}"
    )
    rows = [
        (part[0], part[1], f"{part[2]:,}", f"{part[3]:,}")
        for part in (parts if isinstance(parts, list) else [])[:100]
        if isinstance(part, list) and len(part) == 4 and all(type(n) is int for n in part[2:])
    ]
    heads = (words["part"], words["class"], words["parameters"], words["trained"])
    return f"<p>{escaped(said)}</p>{table(heads, rows, numbers=2) if rows else ''}\n"
