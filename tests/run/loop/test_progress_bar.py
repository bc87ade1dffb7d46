"""The bar of a run and the lines of its epochs, in a real terminal; the loss comes without waiting."""

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from flambeau.run.loop import progress_bar
from flambeau.run.loop.progress_bar import NewestLoss
from pseudo_terminal import drawn, left, on_terminal

LOOP = textwrap.dedent("""
    import torch
    from torch import nn
    from torch.nn.functional import cross_entropy
    from torch.utils.data import TensorDataset
    from flambeau import Run

    points = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(points, (points.norm(dim=1) < 1).long())
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    run = Run("run", model, torch.optim.SGD(model.parameters(), lr=0.1), data, duration="2ep", batch_size=10)
    for epoch in run.epochs():
        for inputs, targets in run.batches():
            run.progress._due = 0  # each step is drawn
            run.step(cross_entropy(model(inputs), targets))
        if epoch == 0:
            for inputs, targets in run.evaluate(data):
                run.log(val_accuracy=model(inputs).argmax(1) == targets)
""")


@pytest.fixture(scope="module")
def screens(tmp_path_factory: pytest.TempPathFactory, forked_python: Any) -> dict[int, str]:
    folder = tmp_path_factory.mktemp("screens")
    found = {}
    for columns in (80, 120):
        (folder / f"{columns}").mkdir()
        found[columns] = on_terminal(forked_python, LOOP, folder / f"{columns}", columns=columns)
    return found


@pytest.mark.parametrize("columns", [80, 120])
def test_the_bar_has_its_figures_from_the_first_step_on(
    screens: dict[int, str], columns: int
) -> None:
    lines = [line for line in drawn(screens[columns]) if "━" in line]
    assert max(map(len, lines)) < columns
    first, second, *_ = lines
    assert re.fullmatch(r"epoch 1/2  ━+ +0%  [\d.]+ GiB *", first)
    assert re.search(r" 8%  loss \d\.\d{4}  \d+ images/s  waiting \d+%  0:0\d left", second)
    assert ("epoch 0:0" in second and "GiB" in second) == (columns == 120)
    assert any("evaluating" in line for line in lines)


@pytest.mark.parametrize("columns", [80, 120])
def test_what_is_left_are_the_lines_of_the_epochs(screens: dict[int, str], columns: int) -> None:
    first, verdict, second, *rest = left(screens[columns])
    assert verdict.startswith("waits for data ")
    assert re.fullmatch(
        r"epoch 1/2  loss \d\.\d{4}  val_accuracy 0\.\d{4} \* best  \d\.\d s", first
    )
    assert re.fullmatch(r"epoch 2/2  loss \d\.\d{4}  \d\.\d s", second)
    assert rest == [""]
    assert "\x1b[1;32m* best\x1b[0m" in screens[columns]


@pytest.mark.parametrize("environment", [{"TERM": "dumb"}, {"NO_COLOR": "1"}])
def test_no_color_where_none_is_wanted(
    tmp_path: Path, forked_python: Any, environment: dict[str, str]
) -> None:
    screen = on_terminal(forked_python, LOOP, tmp_path, columns=100, **environment)
    assert "* best" in screen
    colors = set(re.findall(r"\x1b\[([0-9;]*)m", screen))
    assert colors <= {"1", "0"}  # bold is no color
    if "TERM" in environment:
        assert "\x1b" not in screen
        assert "━" not in screen


def losses(*values: float) -> list[torch.Tensor]:
    return [torch.tensor(float(value)) for value in values]


def test_the_newest_loss_is_a_mean_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(progress_bar.time, "perf_counter", lambda: now[0])
    newest = NewestLoss(torch.device("cpu"))
    assert newest.read([]) is None
    assert newest.read(losses(1, 2)) == 1.5
    assert newest.read(losses(7)) is None
    now[0] += 1.1
    assert newest.read(losses(*[9] * 60, *[4] * 50)) == 4


def test_a_copy_that_is_under_way_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CUDA device, with an event that says when."""

    class Event:
        is_over = False

        def __init__(self, *_: Any) -> None: ...

        def record(self) -> None: ...

        def query(self) -> bool:
            return Event.is_over

        def synchronize(self) -> None:
            raise AssertionError("waited")

    monkeypatch.setattr(torch, "Event", Event)
    newest = NewestLoss(torch.device("cuda"))
    newest._on_host = torch.zeros(())
    assert newest.read(losses(3)) is None
    newest._due = 0
    assert newest.read(losses(5)) is None  # no second copy over the first
    Event.is_over = True
    newest._due = float("inf")
    assert newest.read([]) == 3
    assert newest.read([]) is None


def test_other_devices_are_read_at_log_points_alone() -> None:
    assert NewestLoss(torch.device("meta")).read([torch.zeros((), device="meta")]) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_nothing_waits() -> None:
    newest, device = NewestLoss(torch.device("cuda")), torch.device("cuda")
    found, values = None, [torch.tensor(2.0, device=device)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(100_000):
            found = newest.read(values)
            if found is not None:
                break
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found == 2
