"""Layers: every edge goes down, nothing overlaps, few crossings where there need be none."""

import itertools
import random

import networkx
import pytest

from flambeau.inspection.graphs.layered_layout import layered_layout


@pytest.mark.parametrize("seed", range(8))
def test_edges_go_down_and_nothing_overlaps(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randrange(2, 60)
    sizes = [(rng.uniform(5, 200), rng.uniform(5, 60)) for _ in range(count)]
    edges = [(a, b) for b in range(count) for a in range(b) if rng.random() < 2 / count]
    layout = layered_layout(sizes, edges)
    rows: dict[float, list[tuple[float, float]]] = {}
    for (x, y), (width, height) in zip(layout.centers, sizes, strict=True):
        assert x - width / 2 >= -1e-6 and x + width / 2 <= layout.width + 1e-6
        assert y - height / 2 >= -1e-6 and y + height / 2 <= layout.height + 1e-6
        rows.setdefault(y, []).append((x - width / 2, x + width / 2))
    for row in rows.values():
        row.sort()
        assert all(a[1] < b[0] for a, b in itertools.pairwise(row))
    for (a, b), line in zip(edges, layout.lines, strict=True):
        ys = [y for _, y in line]
        assert ys == sorted(ys)
        assert line[0] == pytest.approx(
            (layout.centers[a][0], layout.centers[a][1] + sizes[a][1] / 2)
        )
        assert line[-1] == pytest.approx(
            (layout.centers[b][0], layout.centers[b][1] - sizes[b][1] / 2)
        )
    graph = networkx.DiGraph(edges)
    longest = networkx.dag_longest_path_length(graph) + 1 if edges else 1
    assert len(rows) == longest


def test_a_tree_has_no_crossings() -> None:
    edges = [((n - 1) // 2, n) for n in range(1, 31)]
    random.Random(0).shuffle(edges)
    layout = layered_layout([(10.0, 10.0)] * 31, edges)
    for a, b in edges:
        for c, d in edges:
            if layout.centers[a][1] == layout.centers[c][1]:
                before = layout.centers[a][0] - layout.centers[c][0]
                after = layout.centers[b][0] - layout.centers[d][0]
                assert before * after >= -1e-6


def test_circles_and_nothing_at_all_end_too() -> None:
    assert layered_layout([], []).lines == ()
    layout = layered_layout([(1.0, 1.0)] * 3, [(0, 1), (1, 2), (2, 0)])
    assert len({y for _, y in layout.centers}) == 3
