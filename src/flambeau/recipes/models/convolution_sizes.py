"""Sizes of convolutions, poolings and transposed convolutions: the output, and which inputs are unused.

卷积、池化和转置卷积的尺寸：输出多大，又有哪些输入没有用到。

Source: Dumoulin, Visin, "A guide to convolution arithmetic for deep learning", arXiv 1603.07285; the
receptive field by Araujo et al., "Computing receptive fields of convolutional neural networks", Distill 2019.

One dimension at a time: height and width are independent.
"""

from collections.abc import Sequence
from dataclasses import dataclass

_MAX_LINES = 24  # of a picture


@dataclass(frozen=True)
class Window:
    """A convolution or pooling along one dimension, with the names and defaults of nn.Conv2d.

    Attributes:
        kernel: taps, at least 1.
        padding: positions added at each end.
        transposed: as nn.ConvTranspose2d.
        output_padding: positions added at the output's end, if transposed.
        ceil_mode: of a pooling, whose padding is at most half of its kernel: the last window may reach beyond
            the end, but not begin there.

    Raises:
        ValueError: a number out of range.

    Example:
        >>> Window(7, stride=2, padding=3).output(224)
        112
        >>> Window(4, stride=2, padding=1, transposed=True).output(112)
        224
    """

    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    transposed: bool = False
    output_padding: int = 0
    ceil_mode: bool = False

    def __post_init__(self) -> None:
        for name in ("kernel", "stride", "dilation"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("padding", "output_padding"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if self.output_padding and not self.transposed:
            raise ValueError("output_padding is for a transposed convolution")
        if self.output_padding >= max(self.stride, self.dilation) and self.transposed:
            raise ValueError("output_padding must be less than stride or dilation")
        if self.ceil_mode and self.transposed:
            raise ValueError("ceil_mode is for a pooling, not for a transposed convolution")
        if self.ceil_mode and self.padding > self.kernel // 2:
            raise ValueError(
                f"a pooling takes at most half of its kernel of {self.kernel} as padding, got {self.padding}"
            )

    @property
    def extent(self) -> int:
        """Positions from the first tap to the last."""
        return self.dilation * (self.kernel - 1) + 1

    def output(self, size: int) -> int:
        """The size of the output for an input of `size` positions.

        Raises:
            ValueError: the output would be empty: the padded input is smaller than the window.
        """
        room = size + 2 * self.padding - self.extent
        if self.transposed:
            count = (size - 1) * self.stride - 2 * self.padding + self.extent + self.output_padding
        elif self.ceil_mode:
            count = -(-room // self.stride) + 1
            if (count - 1) * self.stride >= size + self.padding:
                count -= 1  # the last window would begin beyond the end
        else:
            count = room // self.stride + 1 if room >= 0 else 0
        if count < 1:
            raise ValueError(
                f"a window of {self.extent} positions does not fit {size} with {self.padding} at each end"
            )
        return count

    def unused(self, size: int) -> int:
        """Number of input positions that no tap reads, so that their gradient is zero; 0 if transposed."""
        if self.transposed:
            return 0
        read = bytearray(size)
        windows = self.output(size) * self.stride
        for k in range(self.kernel):
            first = k * self.dilation - self.padding
            start = first if first >= 0 else first % self.stride
            taps = range(start, min(size, first + windows), self.stride)
            for position in taps:
                read[position] = 1
        return read.count(0)


def same_padding(kernel: int, dilation: int = 1) -> int:
    """The padding that keeps the size at stride 1.

    Raises:
        ValueError: no padding that is equal at both ends does.

    Example:
        >>> same_padding(3), same_padding(3, dilation=4)
        (1, 4)
    """
    if dilation * (kernel - 1) % 2:
        raise ValueError(
            f"a kernel of {kernel} needs one position more at one end than at the other"
        )
    return dilation * (kernel - 1) // 2


@dataclass(frozen=True)
class Stage:
    """One window in a chain.

    Attributes:
        size: of its output.
        unused: positions of its input that no tap reads.
        sees: positions of the chain's input that one output depends on.
        jump: positions of the chain's input from one output to the next.
    """

    size: int
    unused: int
    sees: float
    jump: float


def chain(size: int, windows: Sequence[Window]) -> list[Stage]:
    """Sizes and receptive fields of consecutive windows.

    Args:
        windows: in forward order.

    Raises:
        ValueError: a window does not fit its input; the message gives its number.

    Example:
        >>> resnet = [Window(7, stride=2, padding=3), Window(3, stride=2, padding=1)]
        >>> [(stage.size, stage.sees) for stage in chain(224, resnet)]
        [(112, 7), (56, 11)]
    """
    stages: list[Stage] = []
    sees, jump = 1.0, 1.0
    for number, window in enumerate(windows, 1):
        try:
            after = window.output(size)
        except ValueError as error:
            raise ValueError(f"window {number}: {error}") from None
        taps = -(-window.extent // window.stride) if window.transposed else window.extent
        sees += (taps - 1) * jump
        jump = jump / window.stride if window.transposed else jump * window.stride
        stages.append(Stage(after, window.unused(size), _number(sees), _number(jump)))
        size = after
    return stages


def _number(value: float) -> float:
    return int(value) if value == int(value) else value


def picture(size: int, window: Window, *, columns: int = 78) -> str:
    """Draw as text which positions each window covers: `+` is padding, `#` a tap, `.` a position between.

    Args:
        size: of the input; transposed windows are drawn over the output.
        window: of many, the first three and the last two are drawn.
        columns: greatest width; of longer lines both ends are drawn.

    Example:
        >>> print(picture(5, Window(3, stride=2, padding=1)))
        +01234+
        ###....
        ..###..
        ....###
    """
    count = window.output(size)
    shown = size
    across = size + 2 * window.padding
    if window.transposed:
        shown, count = count, size
        across = (size - 1) * window.stride + window.extent + window.output_padding
    ruler = "".join(
        str((p - window.padding) % 10) if 0 <= p - window.padding < shown else "+"
        for p in range(across)
    )
    lines = [ruler]
    for number in range(count):
        start = number * window.stride
        taps = {start + k * window.dilation for k in range(window.kernel)}
        lines.append("".join("#" if p in taps else "." for p in range(max(across, max(taps) + 1))))
    lines = lines if len(lines) <= _MAX_LINES else [*lines[:4], "...", *lines[-2:]]
    half = (columns - 5) // 2
    return "\n".join(
        line if len(line) <= columns else f"{line[:half]} ... {line[-half:]}" for line in lines
    )
