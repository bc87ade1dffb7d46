"""The memory of a training step over its time as an SVG picture."""

from collections import defaultdict

from flambeau.inspection.graphs.picture import size_text
from flambeau.inspection.svg import LINE, SIZE, Picture
from flambeau.inspection.timing.memory_timeline import MemoryTimeline, Owner

_WIDTH, _HEIGHT = 860.0, 300.0  # of the chart, pixels
_LEFT, _TOP = 90.0, 70.0
_BELOW = 46.0  # from the chart to the text below it
_COLORS = ("#eef3fb", "#fdf3e7", "#eef7ec", "#f6eef8")  # of the parts
_OWNERS = 12  # that are named
_POINTS = 3000  # stretches of the line


class _Chart:
    """Places of seconds and bytes."""

    def __init__(self, timeline: MemoryTimeline) -> None:
        ends = [part.end_s for part in timeline.parts]
        self.end_s = max(timeline.samples[-1][0], *ends, 1e-9)
        self.most = max(timeline.peak_bytes, 1)

    def x(self, seconds: float) -> float:
        return _LEFT + _WIDTH * seconds / self.end_s

    def y(self, size: float) -> float:
        return _TOP + _HEIGHT * (1 - size / self.most)


def svg_of_memory(timeline: MemoryTimeline) -> str:
    """Draw bytes over time, the parts of the step behind it, and who owns the peak below."""
    chart = _Chart(timeline)
    peak = size_text(timeline.peak_bytes)
    lines = min(len(timeline.owners), _OWNERS + 1)
    picture = Picture(
        _LEFT + _WIDTH + 40,
        _TOP + _HEIGHT + _BELOW + LINE * (lines + 2),
        title=f"Memory of a training step: {timeline.about}",
        description=f"The peak is {peak} above what was there before, after "
        f"{timeline.peak_s * 1000:.3g} ms of {chart.end_s * 1000:.3g} ms.",
    )
    picture.words(20, 24, "Memory of a training step", bold=True, size=SIZE + 2)
    picture.words(20, 24 + LINE, timeline.about)
    _draw_axes(picture, chart, timeline)
    picture.area(_outline(timeline, chart), fill="#4a6fa5")
    x = chart.x(timeline.peak_s)
    picture.line((x, _TOP), (x, _TOP + _HEIGHT), color="#a00")
    _draw_owners(picture, timeline)
    return picture.text()


def _draw_axes(picture: Picture, chart: _Chart, timeline: MemoryTimeline) -> None:
    for number, part in enumerate(timeline.parts):
        x, to = chart.x(part.start_s), chart.x(part.end_s)
        picture.begin(f"{part.name}: {(part.end_s - part.start_s) * 1000:.3g} ms")
        color = _COLORS[number % len(_COLORS)]
        picture.box((x, _TOP, to - x, _HEIGHT), fill=color, line="none", round_=0)
        if to - x > len(part.name) * SIZE * 0.65:
            picture.words((x + to) / 2, _TOP - 5, part.name, anchor="middle", color="#555")
        picture.end()
    for quarter in range(5):
        size = chart.most * quarter / 4
        seconds = chart.end_s * quarter / 4
        y = chart.y(size)
        picture.line((_LEFT, y), (_LEFT + _WIDTH, y), color="#ccc")
        picture.words(_LEFT - 6, y + 4, size_text(round(size)), anchor="end", color="#555")
        label = f"{seconds * 1000:.3g} ms"
        picture.words(chart.x(seconds), _TOP + _HEIGHT + 16, label, anchor="middle", color="#555")


def _draw_owners(picture: Picture, timeline: MemoryTimeline) -> None:
    y = _TOP + _HEIGHT + _BELOW
    peak, before = size_text(timeline.peak_bytes), size_text(timeline.there_before)
    head = f"At the peak, {peak} above what was there before ({before} of parameters and buffers, "
    picture.words(20, y, head + "and the optimizer's state):", bold=True)
    owners = list(timeline.owners[:_OWNERS])
    if more := timeline.owners[_OWNERS:]:
        owners.append(Owner(f"{len(more)} more", sum(owner.size_bytes for owner in more)))
    for number, owner in enumerate(owners, start=1):
        picture.words(120, y + LINE * number, size_text(owner.size_bytes), anchor="end")
        picture.words(132, y + LINE * number, owner.name)


def _outline(timeline: MemoryTimeline, chart: _Chart) -> list[tuple[float, float]]:
    """Steps up and down; of many points the highest and the lowest in each stretch of the line."""
    stretches: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for seconds, size in timeline.samples:
        stretches[int(seconds / chart.end_s * _POINTS)].append((seconds, size))
    outline = [(chart.x(0), chart.y(0))]
    last = 0
    for stretch in stretches.values():
        by_size = sorted(stretch, key=lambda sample: sample[1])
        for seconds, size in sorted({stretch[0], by_size[0], by_size[-1], stretch[-1]}):
            outline += [(chart.x(seconds), chart.y(last)), (chart.x(seconds), chart.y(size))]
            last = size
    return [*outline, (chart.x(chart.end_s), chart.y(last)), (chart.x(chart.end_s), chart.y(0))]
