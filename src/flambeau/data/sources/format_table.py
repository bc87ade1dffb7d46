"""The formats of packed images: their names, their endings, and what each can do; the one list of them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Format:
    """One format.

    Attributes:
        kind: its name.
        endings: of its files, or of the folders that it is, the usual one first; none of a folder of images.
        package: what writing it needs beside what flambeau itself needs.
        folder_files: such a file in a folder makes the folder one of this format.
        is_folder: what has one of the endings is a folder.
        is_sharded: several files of it may be one data set.
        holds: 'files' of images, 'pixels', 'both', or 'paths' of files elsewhere; of the last none is packed.
        is_zip: with a CRC-32 for each member.
        is_walked: its records can be found behind damage, and are saved as they stand.
        checksums: of each byte of an image; None where that depends on the file.
    """

    kind: str
    endings: tuple[str, ...]
    package: str | None = None
    folder_files: tuple[str, ...] = ()
    is_folder: bool = False
    is_sharded: bool = True
    holds: str = "files"
    is_zip: bool = False
    is_walked: bool = False
    checksums: bool | None = False

    @property
    def is_array(self) -> bool:
        """Whether it holds arrays; their labels are numbers, without names of classes."""
        return self.holds in ("pixels", "both")


_ZARR = ("zarr.json", ".zgroup", ".zarray")
FORMATS = {
    form.kind: form
    for form in (
        Format("rec", (".rec",), is_walked=True),
        Format("tfrecord", (".tfrecord", ".tfrecords", ".tfrec"), is_walked=True, checksums=True),
        Format("tar", (".tar",), is_walked=True),
        Format("lmdb", (".lmdb", ".mdb"), "lmdb", ("data.mdb",)),
        Format("parquet", (".parquet",), "pyarrow", is_walked=True),
        Format(
            "arrow", (".arrow",), "pyarrow", ("dataset_dict.json", "state.json"), is_walked=True
        ),
        Format("hdf5", (".h5", ".hdf5"), "h5py", holds="both", checksums=None),
        Format(
            "n5",
            (".n5",),
            "tensorstore",
            ("attributes.json",),
            True,
            False,
            "pixels",
            checksums=None,
        ),
        Format("zarr", (".zarr",), "tensorstore", _ZARR, True, False, "pixels", checksums=None),
        Format("npz", (".npz",), holds="both", is_zip=True, checksums=True),
        Format("npy", (".npy",), holds="pixels"),
        Format("pth", (".pth", ".pt"), holds="both", is_zip=True, checksums=True),
        Format("listing", (".csv", ".tsv", ".lst"), is_sharded=False, holds="paths"),
        Format("folder", (), is_folder=True, is_sharded=False),
    )
}
KIND_OF_ENDING = {ending: form.kind for form in FORMATS.values() for ending in form.endings}


def endings_of(*holds: str) -> str:
    """The usual endings of the formats that hold one of these, as a user reads them.

    Example:
        >>> endings_of("pixels", "both")
        '.h5 .n5 .zarr .npz .npy .pth'
    """
    found = (form for form in FORMATS.values() if form.holds in holds)
    return " ".join(
        " ".join(f.endings if f.holds == "paths" else f.endings[:1]) for f in found
    ).strip()
