"""What files are that hold no weights, and what to do about it. Nothing in them is run."""

import re
import zipfile
from pathlib import Path

from flambeau.file_signature import signature
from flambeau.recipes.checkpoints.safe_pickle import NotSupported, PickleRefused

# Kinds that may hold weights.
_READ = frozenset({"zip", "torch", "pickle", "safetensors"})
# First bytes of pickles of protocol 0, which look like text: a dict or list, a tuple, an object.
_PROTOCOL_0 = re.compile(rb"\((?:[dl]p\d+\n|[FILSV][^\n]*\n)|c[\w.]+\n\w+\n")
_ALONE = "save the weights alone, where it can be loaded: torch.save(model.state_dict(), NEW)"
_CURES = {
    "tar": "a tar archive, as torch.save wrote before PyTorch 0.1.10: torch.load(weights_only=False) reads "
    "it, if you trust its author; another one is unpacked with `tar xf FILE`",
    "npy": "one array of NumPy, without a name: numpy.savez(NEW.npz, NAME=numpy.load(FILE)) gives it one",
    "hdf5": "an HDF5 file, as Keras saves weights: h5py reads it, and its arrays, written with "
    "numpy.savez(NEW.npz, **ARRAYS), are read here",
}


def not_weights_reason(path: Path) -> str | None:
    """By its first bytes, what a file without weights is; None if it may hold some."""
    file_type = signature(path)
    if file_type is None or file_type.kind in _READ:
        return None
    if file_type.kind == "text" and path.suffix not in (".safetensors", ".npz", ".npy"):
        return None  # it may be a pickle of the oldest protocol
    if file_type.kind == "json" and path.suffix == ".json":
        return None
    return _CURES.get(file_type.kind, file_type.sentence)


def unreadable_reason(path: Path, error: PickleRefused) -> str | None:
    """What a file is that `safe_pickle` could not read; None if it is damaged."""
    file_type = signature(path)
    if isinstance(error, NotSupported):
        what = _in_zip(path) if file_type is not None and file_type.kind == "zip" else None
        return what or f"{str(error).removeprefix(f'{path}: ')}; {_ALONE}"
    with path.open("rb") as file:
        head = file.read(200)
    if file_type is None and head[:1] != b"\x80" and any(head[:8]):
        begins = f"it begins with the bytes {head[:8].hex(' ')}"
        return f"of no kind that is known here ({begins}); if it was one of weights, it is damaged"
    if file_type is not None and file_type.kind == "text":
        return None if _PROTOCOL_0.match(head) else file_type.sentence
    return None


def _in_zip(path: Path) -> str | None:
    """What an intact zip archive is that torch.save has not written in this form."""
    with zipfile.ZipFile(path) as archive:
        records = archive.infolist()
    names = [record.filename for record in records]
    inner = {name.partition("/")[2] for name in names}
    if "data.pkl" in inner:
        if any(record.compress_type != zipfile.ZIP_STORED for record in records):
            how = "torch.save(torch.load(FILE, weights_only=True), NEW) writes it anew"
            return f"a file of torch.save that was compressed afterwards: {how}"
        return None
    is_program = {"archive_format", "models/model.json"} & inner
    if is_program or "serialized_exported_program.json" in names:
        how = "torch.save(torch.export.load(FILE).state_dict, NEW) takes its weights out"
        return f"a program of torch.export: {how}"
    if names and all(name.endswith(".npy") for name in names):
        return "an archive of NumPy (.npz): name it NAME.npz"
    if "model.weights.h5" in names:
        return "a model of Keras: keras.saving.load_model reads it"
    what = f"a zip archive around {names[0][:100]!r}" if names else "an empty zip archive"
    more = f" and {len(names) - 1} more" * (len(names) > 1)
    return f"{what}{more}, and no file of torch.save: unpack it with `unzip FILE`, and give what was in it"
