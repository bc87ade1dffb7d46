"""In which order the images of an epoch are drawn."""

from flambeau.data.loading.stream_order import EARLIER_STREAMS, STREAMS
from flambeau.data.sources.block_shuffle import block_sampler, default_window
from flambeau.data.sources.source import Source, image_blocks
from flambeau.errors import InputError
from flambeau.recipes.data.samplers import EpochSampler
from flambeau.trainer.parts.class_weights import balanced_sampler
from flambeau.trainer.settings.resolved_settings import ResolvedSettings
from flambeau.trainer.settings.settings import Settings


def shuffle_window(settings: Settings, train: Source) -> int | None:
    """The images among which the next is drawn; None or 0 for all. InputError: not read in blocks."""
    if settings.shuffle_window is None:
        return default_window(train) if settings.balance == "none" else None
    if settings.shuffle_window and image_blocks(train) is None:
        raise InputError(
            f"shuffle_window = {settings.shuffle_window} is for images in .tar, .zip, .rec, .tfrecord, "
            f".parquet and .arrow files, here or in a store, and {train.describe(0)} is none of them: "
            "leave it out"
        )
    return settings.shuffle_window


def epoch_sampler(
    settings: ResolvedSettings, train: Source, *, streams: int
) -> EpochSampler | None:
    """What draws the images of an epoch; None: a whole shuffle, each image once.

    `streams` is of the order by blocks. InputError: the run began in another order, or on another kind of
    data.
    """
    if not settings.shuffle_window:
        return balanced_sampler(settings, train.labels)
    if streams not in (STREAMS, EARLIER_STREAMS):
        raise InputError(
            f"this run draws images block by block (shuffle_window = {settings.shuffle_window}) in the order "
            "of another version of flambeau\nContinue it with that version, or begin a new run"
        )
    sampler = block_sampler(
        train, window=settings.shuffle_window, seed=settings.seed, streams=streams
    )
    if sampler is None:  # the data lie elsewhere than when the run began
        raise InputError(
            f"this run draws images block by block (shuffle_window = {settings.shuffle_window}), and "
            f"{train.describe(0)} is in no .tar, .zip, .rec, .tfrecord, .parquet or .arrow file\n"
            "Name the data as they were packed"
        )
    return sampler
