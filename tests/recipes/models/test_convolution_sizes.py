"""Sizes against torch's own layers, unused positions and receptive fields against gradients."""

import itertools
import random

import pytest
import torch
from torch import nn

from flambeau.recipes.models.convolution_sizes import Window, chain, picture, same_padding

RANDOM = random.Random(0)
RANGES = ((8, 40), (1, 5), (1, 4), (0, 2), (1, 3))
WINDOWS = [tuple(RANDOM.randint(*limits) for limits in RANGES) for _ in range(40)]


def convolution(window: Window) -> nn.Module:
    """One channel, weights of 1."""
    if window.transposed:
        layer: nn.Module = nn.ConvTranspose1d(
            1, 1, window.kernel, window.stride, window.padding, window.output_padding,
            dilation=window.dilation, bias=False,
        )  # fmt: skip
    else:
        layer = nn.Conv1d(
            1, 1, window.kernel, window.stride, window.padding, window.dilation, bias=False
        )
    nn.init.ones_(layer.weight)  # type: ignore[arg-type]
    return layer


@pytest.mark.parametrize(("size", "kernel", "stride", "padding", "dilation"), WINDOWS)
def test_sizes_and_unused_positions(
    size: int, kernel: int, stride: int, padding: int, dilation: int
) -> None:
    window = Window(kernel, stride, padding, dilation)
    x = torch.ones(1, 1, size, requires_grad=True)
    y = convolution(window)(x)
    assert window.output(size) == y.shape[2]
    y.sum().backward()
    assert x.grad is not None
    assert window.unused(size) == int((x.grad == 0).sum())


@pytest.mark.parametrize(("size", "kernel", "stride", "padding", "dilation"), WINDOWS)
def test_pooling_with_ceil_mode(
    size: int, kernel: int, stride: int, padding: int, dilation: int
) -> None:
    padding = min(padding, kernel // 2)  # what torch allows
    window = Window(kernel, stride, padding, dilation, ceil_mode=True)
    pool = nn.MaxPool1d(kernel, stride, padding, dilation, ceil_mode=True)
    assert window.output(size) == pool(torch.zeros(1, 1, size)).shape[2]


@pytest.mark.parametrize(("size", "kernel", "stride", "padding", "dilation"), WINDOWS)
def test_transposed(size: int, kernel: int, stride: int, padding: int, dilation: int) -> None:
    more = min(1, max(stride, dilation) - 1)
    window = Window(kernel, stride, padding, dilation, transposed=True, output_padding=more)
    assert window.output(size) == convolution(window)(torch.zeros(1, 1, size)).shape[2]


def test_positions_that_no_tap_reads_are_those_without_a_gradient() -> None:
    for _ in range(300):
        window = Window(
            RANDOM.randint(1, 6), RANDOM.randint(1, 6), RANDOM.randint(0, 9), RANDOM.randint(1, 5)
        )
        size = RANDOM.randint(1, 12)
        if size + 2 * window.padding < window.extent:
            continue
        x = torch.ones(1, 1, size, requires_grad=True)
        convolution(window)(x).sum().backward()
        assert x.grad is not None
        assert window.unused(size) == int((x.grad == 0).sum()), (size, window)


def test_pooling_of_small_inputs_is_torchs() -> None:
    for kernel, stride, padding, dilation, size in itertools.product(
        range(1, 5), range(1, 5), range(4), (1, 2), range(1, 7)
    ):
        case = (kernel, stride, padding, dilation, size)
        try:
            pool = nn.MaxPool1d(kernel, stride, padding, dilation, ceil_mode=True)
            expected = pool(torch.zeros(1, 1, size)).shape[2]
        except RuntimeError:
            expected = 0
        try:
            got = Window(kernel, stride, padding, dilation, ceil_mode=True).output(size)
        except ValueError:
            got = 0
        assert got == expected, case


def test_a_chain_sees_what_its_gradient_reaches() -> None:
    windows = [Window(7, 2, 3), Window(3, 2, 1), Window(3, 1, 2, dilation=2), Window(2, 2)]
    stages = chain(128, windows)
    x = torch.ones(1, 1, 128, requires_grad=True)
    y = nn.Sequential(*map(convolution, windows))(x)
    assert stages[-1].size == y.shape[2]
    y[0, 0, y.shape[2] // 2].backward()
    assert x.grad is not None
    reached = torch.nonzero(x.grad[0, 0])
    assert stages[-1].sees == int(reached.max() - reached.min()) + 1
    assert stages[-1].jump == 8


def test_the_gradient_of_a_left_over_position_is_zero() -> None:
    assert Window(3, stride=2).unused(224) == 1  # why ImageNet networks pad, or take 225
    assert Window(3, stride=2, padding=1).unused(224) == 0
    assert Window(2, stride=2).unused(7) == 1
    assert Window(3, stride=2, dilation=2).unused(9) == 4  # every second one


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"kernel": 0}, "kernel must be at least 1, got 0"),
        ({"kernel": 3, "stride": 0}, "stride must be at least 1"),
        ({"kernel": 3, "padding": -1}, "padding must be at least 0, got -1"),
        ({"kernel": 3, "output_padding": 1}, "output_padding is for a transposed"),
        ({"kernel": 3, "stride": 2, "transposed": True, "output_padding": 2}, "must be less than stride"),
    ],
)  # fmt: skip
def test_wrong_numbers(arguments: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Window(**arguments)  # type: ignore[arg-type]


def test_what_does_not_fit() -> None:
    with pytest.raises(
        ValueError, match="a window of 9 positions does not fit 5 with 1 at each end"
    ):
        Window(5, dilation=2, padding=1).output(5)
    with pytest.raises(ValueError, match="window 2: a window of 7 positions does not fit 3 with 0"):
        chain(7, [Window(3, 2), Window(7)])
    with pytest.raises(ValueError, match="a kernel of 4 needs one position more"):
        same_padding(4)


def test_same_padding_keeps_the_size() -> None:
    for kernel, dilation in ((1, 1), (3, 1), (5, 2), (4, 2)):
        window = Window(kernel, padding=same_padding(kernel, dilation), dilation=dilation)
        assert window.output(17) == 17


def test_pictures() -> None:
    assert picture(4, Window(3, dilation=2, padding=1)) == "+0123+\n#.#.#.\n.#.#.#"
    assert picture(2, Window(3, stride=2, transposed=True)) == "01234\n###..\n..###"
    wide = picture(224, Window(7, stride=2, padding=3), columns=41).splitlines()
    assert [len(line) for line in wide] == [41, 41, 41, 41, 3, 41, 41]
    assert wide[0] == "+++012345678901234 ... 901234567890123+++"
    assert wide[1] == "#######........... ... .................."
    assert wide[-1] == ".................. ... ..........#######."
