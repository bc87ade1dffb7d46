"""What a run says of its first loss; the loss of a healthy script gives no line."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from flambeau import Run
from flambeau.run.loop.first_loss import suspicious_lines

X = torch.arange(48.0).sin().view(8, 6)
Y = torch.arange(8) % 3
LINEAR = nn.Linear(6, 3)
ONE = nn.Linear(6, 1)
IMAGES = torch.arange(8 * 3 * 6 * 6.0).cos().view(8, 3, 6, 6)
CONV = nn.Conv2d(3, 4, 3)
NETWORK = nn.Sequential(CONV, nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
WITH_NORM = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 3))


@pytest.fixture(autouse=True)
def _seeded_weights() -> None:
    torch.manual_seed(0)
    for module in (LINEAR, ONE, *NETWORK, *WITH_NORM):
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


SUSPICIOUS: dict[str, tuple[Callable[[], Tensor], str]] = {
    "softmax before cross_entropy": (
        lambda: F.cross_entropy(LINEAR(X).softmax(1), Y),
        "cross_entropy gets probabilities",
    ),
    "with its last dimension named otherwise": (
        lambda: F.cross_entropy(LINEAR(X).softmax(-1), Y, label_smoothing=0.1),
        "cross_entropy gets probabilities",
    ),
    "softmax, and cross_entropy of probabilities": (
        lambda: F.cross_entropy(LINEAR(X).softmax(1), F.one_hot(Y, 3).float()),
        "cross_entropy gets probabilities",
    ),
    "softmax of each pixel": (
        lambda: F.cross_entropy(CONV(IMAGES).softmax(1), torch.zeros(8, 4, 4).long()),
        "cross_entropy gets probabilities",
    ),
    "softmax in half precision": (
        lambda: F.cross_entropy(LINEAR(X).bfloat16().softmax(1).float(), Y),
        "cross_entropy gets probabilities",
    ),
    "sigmoid before cross_entropy": (
        lambda: F.cross_entropy(LINEAR(X).sigmoid(), Y),
        "cross_entropy gets the outputs of a sigmoid",
    ),
    "ReLU before cross_entropy": (
        lambda: F.cross_entropy(LINEAR(X).relu(), Y),
        "cross_entropy gets the outputs of a ReLU",
    ),
    "sigmoid twice": (
        lambda: F.binary_cross_entropy_with_logits(ONE(X).sigmoid(), torch.ones(8, 1)),
        "binary_cross_entropy_with_logits gets the outputs of a sigmoid",
    ),
    "softmax before nll_loss": (
        lambda: F.nll_loss(LINEAR(X).softmax(1), Y),
        "nll_loss gets probabilities",
    ),
    "nll_loss of logits": (
        lambda: F.nll_loss(LINEAR(X), Y),
        "nll_loss gets the outputs of a layer",
    ),
    "shapes broadcast": (
        lambda: (ONE(X) - X[:, 0]).square().mean(),
        "outputs of shape (8, 1) and targets has the shape (8, 8)",
    ),
    "shapes broadcast, targets first": (
        lambda: (X[:, 0] - ONE(X)).abs().mean(),
        "outputs of shape (8, 1) and targets has the shape (8, 8)",
    ),
    "pixels": (
        lambda: F.cross_entropy(NETWORK(IMAGES.add(1).mul(127).round()), Y),
        "the first layer reads numbers from 0 to 254",
    ),
    "pixels into a linear layer": (
        lambda: F.cross_entropy(LINEAR(X.add(1).mul(127).round()), Y),
        "the first layer reads numbers from 0 to 254",
    ),
    "pixels into one without a bias": (
        lambda: -(X.add(1).mul(127) @ LINEAR.weight.t()).mean(),
        "the first layer reads numbers from",
    ),
    "one buffer": (
        lambda: F.cross_entropy(NETWORK(IMAGES[:1].expand(8, -1, -1, -1)), Y),
        "all 8 samples of the first batch are equal",
    ),
    "far from chance": (
        lambda: F.cross_entropy(100 * LINEAR(X), Y),
        "and chance gives 1.1",
    ),
    "targets in thousands": (
        lambda: F.mse_loss(ONE(X), 2000 + X[:, :1]),
        "targets are 2e+03 in the root mean square",
    ),
}
HEALTHY: dict[str, Callable[[], Tensor]] = {
    "cross_entropy": lambda: F.cross_entropy(LINEAR(X), Y),
    "of pixels": lambda: F.cross_entropy(CONV(IMAGES), torch.zeros(8, 4, 4).long()),
    "nll_loss": lambda: F.nll_loss(LINEAR(X).log_softmax(1), Y),
    "logarithm of softmax": lambda: F.nll_loss(LINEAR(X).softmax(1).log(), Y),
    "softmax over others": lambda: F.cross_entropy(LINEAR(X).softmax(0), Y),
    "BCE": lambda: F.binary_cross_entropy_with_logits(ONE(X), torch.ones(8, 1)),
    "BCE of a sigmoid": lambda: F.binary_cross_entropy(ONE(X).sigmoid(), torch.ones(8, 1)),
    "equal shapes": lambda: (ONE(X)[:, 0] - X[:, 0]).square().mean(),
    "each against each": lambda: (ONE(X) - ONE(X).t()).square().mean(),
    "one sample": lambda: (ONE(X[:1]) - X[:1, 0]).square().mean(),
    "equal images of one class": lambda: F.cross_entropy(
        NETWORK(IMAGES[:1].repeat(8, 1, 1, 1)), Y * 0
    ),
    "pixels, normalized inside": lambda: F.cross_entropy(WITH_NORM(IMAGES * 200), Y),
    "signals, normalized inside": lambda: F.cross_entropy(
        nn.Sequential(nn.Conv1d(1, 3, 3), nn.BatchNorm1d(3))(300 * X[:, None]).mean(2), Y
    ),
    "no graph": lambda: torch.tensor(1.0),
    "LSTM from zeros": lambda: F.cross_entropy(
        LINEAR(nn.LSTM(6, 6)(nn.Embedding(5, 6)(Y.repeat(2, 1)))[0][0]), Y
    ),
}


@pytest.mark.parametrize("name", SUSPICIOUS)
def test_named(name: str) -> None:
    make, said = SUSPICIOUS[name]
    (line,) = suspicious_lines(make())
    assert said in line


@pytest.mark.parametrize("name", HEALTHY)
def test_silent(name: str) -> None:
    assert suspicious_lines(HEALTHY[name]()) == []


def test_a_graph_without_its_values_is_left_alone() -> None:
    loss = F.cross_entropy(LINEAR(X), Y)
    loss.backward()
    assert suspicious_lines(loss) == []


def test_what_a_hook_gives_back_is_left_to_the_backward_pass() -> None:
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> int:
        kept[len(kept)] = tensor
        return len(kept) - 1

    given_back = []

    def unpack(number: int) -> Tensor:
        given_back.append(number)
        return kept[number]

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        loss = F.cross_entropy(LINEAR(X.add(1).mul(127)).softmax(1), Y)
        squares = F.mse_loss(ONE(X), 2000 + X[:, :1])
    (line,) = suspicious_lines(loss)
    assert "cross_entropy gets probabilities" in line
    assert suspicious_lines(squares) == []
    assert given_back == []


def test_a_checkpointed_part_is_not_computed_for_it() -> None:
    calls = []

    def part(images: Tensor) -> Tensor:
        calls.append(images)
        return NETWORK(images)

    loss = F.cross_entropy(checkpoint(part, IMAGES * 300, use_reentrant=False).softmax(1), Y)
    (line,) = suspicious_lines(loss)
    assert "cross_entropy gets probabilities" in line
    assert len(calls) == 1
    loss.backward()
    assert len(calls) == 2


def test_a_run_says_it_once_and_not_after_a_resume(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def steps(until: int) -> str:
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = Run(
            tmp_path / "run", model, optimizer, TensorDataset(X, Y), batch_size=4,
            duration="6st", checkpoint_every="1st",
        )  # fmt: skip
        for _ in run.epochs():
            for x, y in run.batches():
                if run.state.step == until:
                    run.close()
                    return capfd.readouterr().err
                run.step(F.cross_entropy(model(x).softmax(1), y))
        return capfd.readouterr().err

    assert steps(until=3).count("cross_entropy gets probabilities") == 1
    assert "cross_entropy gets probabilities" not in steps(until=6)
    events = (tmp_path / "run" / "events.jsonl").read_text(encoding="utf-8")
    assert events.count("cross_entropy gets probabilities") == 1
