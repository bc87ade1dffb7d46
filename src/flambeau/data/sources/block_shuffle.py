"""The order in two levels of images that are read in blocks: whether it is the default, and its sampler."""

from flambeau.data.loading.stream_order import STREAMS
from flambeau.data.sources.source import Source, fetches_ahead, image_blocks
from flambeau.recipes.data.samplers import BlockSampler

WINDOW = 16_384
"""Of images in a store; measured by bench/shuffle_windows.py."""


def default_window(source: Source) -> int | None:
    """The window of many images in a store; None to shuffle all of them."""
    # Where the window would hold all of them at once, nothing is won.
    is_large = fetches_ahead(source) and len(source) > 2 * WINDOW
    return WINDOW if is_large and image_blocks(source) is not None else None


def block_sampler(
    source: Source, *, window: int, seed: int, streams: int | None = None
) -> BlockSampler | None:
    """Draws the images of a source block by block; None if they are no parts of files.

    `streams`: STREAMS if None.
    """
    lengths = image_blocks(source)
    if lengths is None:
        return None
    return BlockSampler(lengths, window=window, streams=streams or STREAMS, seed=seed)
