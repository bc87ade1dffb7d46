"""What a model says of images in files, folders, packed files and data sets: `flambeau predict`."""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from torch import Tensor

from flambeau.data.datasets.image_statistics import page_remarks
from flambeau.data.sources.data_names import data_text
from flambeau.data.sources.open_data import Unlabelled, open_unlabelled
from flambeau.data.sources.source import ConcatSource, Source
from flambeau.errors import InputError
from flambeau.images.decode import size_of
from flambeau.terminal import CountBar
from flambeau.trainer.evaluation.answers import Answer, Ranking
from flambeau.trainer.prediction.calibration import Calibration
from flambeau.trainer.prediction.ensemble import Model, members_of, read_model, viewers_of
from flambeau.trainer.prediction.pixel_remarks import batch_remarks


@dataclass(frozen=True, slots=True)
class Sample:
    """An image to predict.

    Attributes:
        image: its path as given, or its name in the source.
        packed: packed images, listing or data set, as the user named it; else None.
        index: its position in `source`, from 0.
        name: what identifies it there: a key, or the listed path.
        label: its class, if known, perhaps not to the model.
    """

    image: str
    packed: str | None
    source: Source
    index: int
    name: str
    label: str | None


def predict(
    trained: Model,
    paths: Sequence[Path],
    *,
    top: int = 5,
    workers: int = 0,
    skip_bad_images: int = 0,
    download: bool = False,
    flip_tta: bool = False,
    progress: bool = False,
    say: Callable[[str], object] = lambda _: None,
) -> Generator[tuple[Sample, Answer]]:
    """Predict, batch by batch.

    Args:
        paths: each an image file, a folder of images, packed images, a listing, torchvision:NAME or
            hf:NAME; see `open_unlabelled`.
        top: classes per image, of a classifier, the most probable first.

    Yields:
        Each image with the model's answer, in the given order.

    Raises:
        InputError: what cannot be opened, or more unreadable images than allowed.
    """
    classes = trained.facts.classes
    given = open_unlabelled(paths, classes, download=download, say=say)
    if not given:
        return
    source = ConcatSource([one.source for one in given])
    samples = (sample for one in given for sample in _samples(one))
    loader, _ = read_model(trained, source, workers=workers, skip_bad_images=skip_bad_images)
    readable = 0
    with CountBar(len(source), unit="images", shown=progress) as bar:
        for micro in loader.stream(epoch=0, position=0, epochs=1):
            here = list(islice(samples, len(micro.indices)))
            left_out = {int(index) - int(micro.indices[0]) for index in micro.bad}
            for row in sorted(left_out):
                say(f"left out, because it cannot be read: {here[row].image}")
            kept = [sample for row, sample in enumerate(here) if row not in left_out]
            readable += len(kept)
            if kept:
                if readable == len(kept):  # the first batch
                    for one, pixels in viewers_of(trained, micro.data[0]):
                        for line in batch_remarks(one, pixels):
                            say(line)
                task = trained.facts.task
                logits = trained.logits(micro.data[0], flip_tta=flip_tta)
                indices = [int(index) for index in micro.indices if index not in micro.bad]
                sizes = [size_of(source.read(index)) for index in indices if task.per_pixel]
                answers = task.answers(logits, sizes, top=top)
                if (calibration := sets_of(trained)) is not None:
                    answers = _with_sets(answers, logits, classes, calibration)
                yield from zip(kept, answers, strict=True)
            bar.update(len(here))
    channels = max(one.facts.channels for one in members_of(trained))
    for line in page_remarks(source, channels=channels):
        say(line)
    if not readable:
        raise InputError(f"none of the {len(source)} images could be read")


def sets_of(model: Model) -> Calibration | None:
    """What makes prediction sets; None for a model without such sets."""
    if model.calibration is None:
        return None
    return None if model.calibration.threshold is None else model.calibration


def _with_sets(
    answers: Sequence[Answer], logits: Tensor, classes: Sequence[str], calibration: Calibration
) -> list[Answer]:
    """With the classes of the set of each image, the most probable first."""
    found: list[Answer] = []
    sets = calibration.named_sets(logits, classes)
    for answer, chosen in zip(answers, sets, strict=True):
        assert isinstance(answer, Ranking)
        found.append(Ranking(answer.classes, chosen))
    return found


def _samples(given: Unlabelled) -> Iterator[Sample]:
    source, packed = given
    names = source.names
    labels = source.labels.tolist()
    for index in range(len(source)):
        yield Sample(
            image=source.describe(index),
            packed=None if packed is None else data_text(packed),
            source=source,
            index=index,
            name=names[index],
            label=source.classes[labels[index]] or None,
        )
