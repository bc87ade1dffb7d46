"""The classes of images in files, folders, packed files and data sets: `flambeau predict`."""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from flambeau.data.sources.open_data import Unlabelled, open_unlabelled
from flambeau.data.sources.source import ConcatSource
from flambeau.errors import InputError
from flambeau.terminal import CountBar
from flambeau.trainer.prediction.trained_model import Trained, read_for
from flambeau.trainer.tasks.classification import rankings


@dataclass(frozen=True, slots=True)
class Sample:
    """An image that is predicted on.

    Attributes:
        image: its path as given, or what its source calls it, such as a record of a file.
        packed: what the user calls the packed images, the listing or the data set that it is one of; None for
            an image in a file of its own.
        index: its position in them, from 0.
        name: what identifies it there: a key, or the path that is listed.
        label: the name of its class, if the source tells; the model may not know it.
    """

    image: str
    packed: str | None
    index: int
    name: str
    label: str | None


def predict(
    trained: Trained,
    paths: Sequence[Path],
    *,
    top: int = 5,
    workers: int = 0,
    skip_bad_images: int = 0,
    download: bool = False,
    flip_tta: bool = False,
    progress: bool = False,
    say: Callable[[str], object] = lambda _: None,
) -> Generator[tuple[Sample, list[tuple[str, float]]]]:
    """Classify images, batch after batch.

    Args:
        trained: the model.
        paths: each an image file, a folder of images, packed images, a listing, torchvision:NAME or
            hf:NAME; see `open_unlabelled`.
        top: how many classes to name for each image, the most probable first; at most all.
        workers: processes that read; 0 reads in this one.
        skip_bad_images: how many unreadable ones to leave out.
        download: fetch what is missing of a data set by name.
        flip_tta: average the probabilities of each image and its mirror image.
        progress: show a bar on a terminal or in a notebook.
        say: takes a line for each image that is left out.

    Yields:
        Each image with (class, probability) pairs, in the order given.

    Raises:
        InputError: something that cannot be opened, or more unreadable images than are allowed.
    """
    classes = trained.facts.classes
    given = open_unlabelled(paths, classes, download=download, say=say)
    if not given:
        return
    source = ConcatSource([one.source for one in given])
    samples = (sample for one in given for sample in _samples(one))
    loader, _ = read_for(trained, source, workers=workers, skip_bad_images=skip_bad_images)
    readable = 0
    with CountBar(len(source), unit="images", shown=progress) as bar:
        for micro in loader.stream(epoch=0, position=0, epochs=1):
            here = list(islice(samples, len(micro.indices)))
            left_out = {int(index) - int(micro.indices[0]) for index in micro.bad}
            for place in sorted(left_out):
                say(f"left out, because it cannot be read: {here[place].image}")
            kept = [sample for place, sample in enumerate(here) if place not in left_out]
            readable += len(kept)
            if kept:
                logits = trained.logits(micro.data[0], flip_tta=flip_tta)
                yield from zip(kept, rankings(logits, classes, top), strict=True)
            bar.update(len(here))
    if not readable:
        raise InputError(f"none of the {len(source)} images could be read")


def _samples(given: Unlabelled) -> Iterator[Sample]:
    source, packed = given
    names = source.names
    labels = source.labels.tolist()
    for index in range(len(source)):
        yield Sample(
            image=source.describe(index),
            packed=None if packed is None else str(packed),
            index=index,
            name=names[index],
            label=source.classes[labels[index]] or None,
        )
