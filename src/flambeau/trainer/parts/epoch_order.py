"""In which order the images of an epoch are drawn."""

import numpy as np

from flambeau.data.sources.sample_blocks import block_lengths
from flambeau.data.sources.source import Source, fetches_ahead, image_sizes
from flambeau.errors import InputError
from flambeau.recipes.data.samplers import BlockSampler, EpochSampler
from flambeau.trainer.parts.class_weights import balanced_sampler
from flambeau.trainer.settings.resolved_settings import ResolvedSettings
from flambeau.trainer.settings.settings import Settings

WINDOW = 16_384
"""Of images in a store; measured by bench/shuffle_windows.py."""


def shuffle_window(settings: Settings, train: Source) -> int | None:
    """The images among which one of an epoch is drawn; None or 0 for all.

    Raises:
        InputError: the data are not read in blocks.
    """
    if settings.shuffle_window is None:
        # Where the window would hold all of them at once, nothing is won.
        is_large = fetches_ahead(train) and len(train) > 2 * WINDOW
        may_mix = settings.balance == "none" and image_sizes(train) is not None
        return WINDOW if is_large and may_mix else None
    if settings.shuffle_window and image_sizes(train) is None:
        raise InputError(
            f"shuffle_window = {settings.shuffle_window} is for images in .tar, .rec, .tfrecord, .parquet "
            f"and .arrow files, here or in a store, and {train.describe(0)} is none of them: leave it out"
        )
    return settings.shuffle_window


def epoch_sampler(settings: ResolvedSettings, train: Source) -> EpochSampler | None:
    """What draws the images of an epoch; None: a whole shuffle, each image once."""
    if not settings.shuffle_window:
        return balanced_sampler(settings, train.labels)
    sizes = image_sizes(train)
    if sizes is None:  # the data lie elsewhere than when the run began
        raise InputError(
            f"this run draws images block by block (shuffle_window = {settings.shuffle_window}), and "
            f"{train.describe(0)} is in no .tar, .rec, .tfrecord, .parquet or .arrow file\n"
            "Name the data as they were packed"
        )
    lengths = block_lengths(np.concatenate(sizes), np.array([len(one) for one in sizes]))
    return BlockSampler(lengths, window=settings.shuffle_window, seed=settings.seed)
