"""The metadata file of Hugging Face's ImageFolder: the labels of a folder's images, beside them."""

from pathlib import Path, PurePosixPath

from flambeau.data.sources.folder import class_folders, images_below
from flambeau.data.sources.listing import ListingSource, has_columns
from flambeau.data.sources.targets import FOUND, TargetChoice, kind_of_targets
from flambeau.errors import InputError

_OTHERS = ("metadata.jsonl", "metadata.parquet")  # which `datasets` reads, too
_CLASSES = "move it elsewhere if the folders are the classes"


def labels_beside(folder: Path, choice: TargetChoice = FOUND) -> Path | None:
    """A folder's metadata.csv if it has the labels of its images; None if the folders have them.

    InputError if both say something else, or if it is of a kind that is not read.
    """
    for name in _OTHERS:
        other = folder / name
        if other.is_file() and images_below(folder)[0]:
            raise InputError(
                f"{other} may hold the labels of the images beside it, and is not read\n"
                f"Write it as metadata.csv with the columns file_name and label, or {_CLASSES}"
            )
    path = folder / "metadata.csv"
    if not path.is_file() or not has_columns(path, choice):
        return None
    if len(class_folders(folder)) < 2:
        return path
    listing = ListingSource(path, choice=choice)
    if kind_of_targets(listing).is_table or listing.mask_names is not None:
        return path
    labels = listing.labels.tolist()
    folders = [PurePosixPath(name).parent.parts for name in listing.names]
    pairs = {(above[:1], label) for above, label in zip(folders, labels, strict=True)}
    if len(pairs) == len({above for above, _ in pairs}) == len({label for _, label in pairs}):
        return None
    for index, (above, label) in enumerate(zip(folders, labels, strict=True)):
        if listing.classes[label] not in above:
            raise InputError(
                f"{listing.describe(index)} is of class {listing.classes[label]!r}, and lies in the folder "
                f"{'/'.join(above) or '.'}\nTrain on the file, {path}, or {_CLASSES}"
            )
    return None
