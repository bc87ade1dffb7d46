"""The formats of packed images: names, endings, and properties."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Format:
    """One format.

    Attributes:
        endings: of its files or folders, the preferred one first; none for a folder of images.
        folder_files: a folder with one of these is of this format.
        holds: 'files' of images, 'pixels', 'both', or 'paths' of files elsewhere, which cannot be packed.
        is_walked: records can be found after damage, and are saved as they are.
        checksums: cover each byte of an image; None: depends on the file.
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
        """Whether it holds arrays, whose labels are numbers without class names."""
        return self.holds in ("pixels", "both")


_ZARR = ("zarr.json", ".zgroup", ".zarray")
FORMATS = {
    form.kind: form
    for form in (
        Format("rec", (".rec",), is_walked=True),
        Format("tfrecord", (".tfrecord", ".tfrecords", ".tfrec"), is_walked=True, checksums=True),
        Format("tar", (".tar",), is_walked=True),
        Format("zip", (".zip",), is_walked=True, checksums=True),
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
    """The preferred endings of the formats that hold one of these, for a message."""
    chosen = (form for form in FORMATS.values() if form.holds in holds)
    return " ".join(
        " ".join(f.endings if f.holds == "paths" else f.endings[:1]) for f in chosen
    ).strip()
