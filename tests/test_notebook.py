"""One notebook, executed as Jupyter does it: bar, chart, results, an interrupt that leaves no traceback."""

import base64
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from flambeau.html_table import html_table
from flambeau.run.folder.published_weights import Result
from flambeau.run.folder.summary import RunSummary
from flambeau.trainer.api import TrainingResult

CELLS = [
    """
from pathlib import Path
import torch
from PIL import Image
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset
import flambeau
from flambeau import Run

for number in range(16):
    for name, color in (("day", "white"), ("night", "black")):
        path = Path(f"photos/{name}/{number}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (16, 16), color).save(path)
""",
    """
small = dict(model="tiny_convnet", batch_size=7, precision="fp32", device="cpu")
result = flambeau.train("photos", epochs=2, out="runs/<b>", **small)
result
""",
    """
import time

def loop(waits):
    points = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(points, (points.norm(dim=1) < 1).long())
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    run = Run("runs/mine", model, sgd, data, duration="2ep", batch_size=10)
    for epoch in run.epochs():
        for inputs, targets in run.batches():
            run.step(cross_entropy(model(inputs), targets))
            if run.state.step == 8 and waits:
                Path("interrupt-me").touch()
                while Path("interrupt-me").exists():
                    time.sleep(0.01)
        for inputs, targets in run.evaluate(data):
            run.log(val_accuracy=model(inputs).argmax(1) == targets)
    return run
""",
    "loop(waits=True)",
    "run = loop(waits=False)\nrun.result",
]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """What each cell shows."""
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    folder = tmp_path_factory.mktemp("notebook")
    cells = [nbformat.v4.new_code_cell(source) for source in CELLS]
    client = nbclient.NotebookClient(
        nbformat.v4.new_notebook(cells=cells), timeout=300, allow_errors=True,
        resources={"metadata": {"path": str(folder)}},
    )  # fmt: skip

    def interrupt() -> None:
        for _ in range(1200):
            if (folder / "interrupt-me").exists():
                client.km.provisioner.process.send_signal(2)  # as the button does
                time.sleep(0.2)  # until it is heard
                (folder / "interrupt-me").unlink()
                return
            time.sleep(0.1)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        client.execute()
    finally:
        thread.join()
    return [cell.outputs for cell in client.nb.cells]


def text_of(cell: list[Any], name: str = "stdout") -> str:
    return "".join(output["text"] for output in cell if output.get("name") == name)


def shown(cell: list[Any], kind: str) -> list[str]:
    return [output["data"][kind] for output in cell if kind in output.get("data", {})]


def test_the_cell_of_a_training_shows_its_lines_a_chart_and_the_result(
    outputs: list[list[Any]],
) -> None:
    cell = outputs[1]
    lines = text_of(cell).splitlines()
    assert [line for line in cell if line.output_type == "error"] == []
    assert "28 images to train on, 4 to evaluate on" in lines
    assert any(re.match(r"epoch 2/2  loss .*val_accuracy \d", line) for line in lines)
    (chart,) = shown(cell, "image/png")
    assert base64.b64decode(chart).startswith(b"\x89PNG")
    *_, result = shown(cell, "text/html")
    assert "val_accuracy" in result
    assert "runs/&lt;b&gt;" in result
    bar, *_ = shown(cell, "text/html")
    assert "━" in bar
    assert "epoch 2/2" in bar
    assert "100%" in bar


def test_an_interrupt_saves_and_shows_no_traceback(outputs: list[list[Any]]) -> None:
    cell = outputs[3]
    bar, *_ = shown(cell, "text/html")
    assert "66%" in bar or "75%" in bar  # where it has stopped
    (error,) = [output for output in cell if output.output_type == "error"]
    assert error.traceback == ["interrupted"]
    assert error.ename == "Interrupted"
    assert re.search(
        r"SIGINT: saved at step \d+ in runs/mine; run the cell again, .*, to continue",
        text_of(cell),
    )


def test_the_cell_run_again_continues(outputs: list[list[Any]]) -> None:
    cell = outputs[4]
    text = text_of(cell)
    assert re.search(r"going on from step \d+ of 12", text)
    assert re.search(r"epoch 2/2 .*val_accuracy", text)
    assert shown(cell, "image/png")
    assert "finished run" in shown(cell, "text/html")[-1]


def test_text_in_a_table_is_escaped() -> None:
    page = html_table("<i>", {"<b>": "&", "loss": 0.12345, "none": None})
    assert "&lt;i&gt;" in page
    assert "&lt;b&gt;" in page
    assert "&amp;" in page
    assert "0.1235" in page or "0.1234" in page
    assert "none" not in page


def test_results_and_runs_have_a_view(tmp_path: Path) -> None:
    name = "<script>"
    views = [
        Result("best", 7, {"val_accuracy": 0.5}),
        TrainingResult(Path(name), "best", 7, {"val_accuracy": 0.5}),
        RunSummary(
            Path(name), name, "stopped", metric="val_accuracy", best=0.5, step=7, steps=9,
            changed=0.0, seconds=61.0, data=name,
        ),
        RunSummary(Path(name), name, "damaged", why=name),
    ]  # fmt: skip
    for view in views:
        page = view._repr_html_()
        assert "<script>" not in page
        assert "damaged" in page or ("0.5000" in page and "7" in page)


def test_a_run_of_a_machine_whose_clock_was_far_off_has_a_view_without_a_time() -> None:
    page = RunSummary(Path("a"), "a", "stopped", step=7, changed=1e18)._repr_html_()
    assert "7/?" in page
    assert "when" not in page
