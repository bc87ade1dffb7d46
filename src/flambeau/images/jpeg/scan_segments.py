"""Random access inside a JPEG: its scan is cut losslessly into segments that can be decoded one by one.

After ITU-T T.81 (JPEG), B.2.1 and B.2.4.4 (restart markers). The format: docs/en/packed_jpeg.md.
Not for pictures that are always decoded whole, where it only costs some bytes.
"""

from flambeau.images.jpeg.headers import read_header
from flambeau.images.native import kernel as native

_REASONS = {
    native.BAD_HEADER: "not a JPEG, or its headers are damaged",
    native.UNSUPPORTED: "a kind of JPEG that cannot be cut into segments",
    native.DAMAGED: "its data is damaged or cut short",
}


class CannotSegment(ValueError):
    """The file cannot be cut into segments; the message is the reason."""


def segment(data: bytes, *, interval_px: int = 64) -> bytes:
    """A JPEG of the same coefficients, and so the same pixels, that the C kernel can enter anywhere.

    Any decoder can read it. Metadata are kept; what follows the image (previews, further images) is left out.
    New Huffman codes often save what the restart markers cost. Repeating it changes nothing.

    Args:
        data: a JPEG with 1 or 3 components of 8 bits, Huffman-coded, sequential or progressive.
        interval_px: approximate width of a segment, 1 to 4096 pixels.

    Raises:
        CannotSegment: another kind of file, or a damaged one; keep it as it is.
        InputError: the C kernel is missing.
    """
    if not 1 <= interval_px <= 4096:
        raise ValueError(f"interval_px must be 1 to 4096, got {interval_px}")
    try:
        return native.require_kernel("cutting JPEGs into segments").segment(data, interval_px)
    except native.KernelError as error:
        if error.code == native.NO_MEMORY:
            raise MemoryError("no memory for the coefficients of a JPEG") from error
        raise CannotSegment(_REASONS[error.code]) from error


def is_segmented(data: bytes) -> bool:
    """Whether it has the index that `segment` writes; reads only the headers."""
    header = read_header(data)
    return header is not None and header.segmented
