"""Pack the data that ships with flambeau: a balanced subset of Fashion-MNIST as two RecordIO files.

    python tools/pack_fashion_mnist.py PATH/fashion_mnist.npz

Run by a maintainer when the files must be remade; the same input gives the same records. The bytes of
a PNG also depend on the zlib inside Pillow, so a remake may change the files, never the pixels.
"""

import argparse
import hashlib
import io
from pathlib import Path

import numpy as np
import PIL
from numpy.typing import NDArray
from PIL import Image

from flambeau.recipes.data.recordio import IRHeader, RecordWriter, pack

FOLDER = Path(__file__).resolve().parents[1] / "src" / "flambeau" / "data" / "embedded"
SPLITS = (  # name of the files, arrays of the original, images of each class
    ("train", "train", 600),
    ("val", "test", 100),
)
ORIGIN = """\
# Origin of the embedded data

`fashion_mnist_train.rec` and `fashion_mnist_val.rec` hold a balanced subset of Fashion-MNIST:
28 x 28 grey images of clothing in ten classes.

- From: https://github.com/zalandoresearch/fashion-mnist, by Han Xiao, Kashif Rasul and Roland Vollgraf
  (Zalando SE), "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning Algorithms",
  arXiv:1708.07747, 2017.
- Licence: MIT, the file LICENSE beside this one.
- Chosen: the first 600 images of each class of the original training set (train) and the first 100 of
  each class of the original test set (val), in their original order.
- Stored: RecordIO with its index; key and image id are the position in the original set, the label is
  the class, the payload is a PNG of the unchanged pixels.
- `fashion_mnist.classes.txt`: the name of class n on line n + 1.
- Made by: `python tools/pack_fashion_mnist.py PATH/fashion_mnist.npz`, with Pillow {pillow}.
  The .npz holds the original arrays as `x_train`, `y_train`, `x_test`, `y_test` and the names as
  `classes`.

| file | records | bytes | SHA-256 |
|---|---|---|---|
"""


def first_of_each_class(labels: NDArray[np.uint8], num_each: int) -> list[int]:
    """Positions of the first `num_each` images of every class, in the order of the original."""
    chosen: list[int] = []
    for label in np.unique(labels):
        found = np.flatnonzero(labels == label)[:num_each]
        if len(found) < num_each:
            raise ValueError(f"class {label} has {len(found)} images, {num_each} are needed")
        chosen += found.tolist()
    return sorted(chosen)


def png(pixels_HW: NDArray[np.uint8]) -> bytes:
    """The smallest PNG of a grey image that Pillow makes."""
    file = io.BytesIO()
    Image.fromarray(pixels_HW).save(file, "PNG", optimize=True)
    return file.getvalue()


def pack_split(
    images_NHW: NDArray[np.uint8], labels: NDArray[np.uint8], num_each: int, path: Path
) -> str:
    """Write one .rec and its .idx; returns its line of the table in ORIGIN.md."""
    for old in (path, path.with_suffix(".idx")):
        old.unlink(missing_ok=True)
    chosen = first_of_each_class(labels, num_each)
    with RecordWriter(path) as writer:
        for i in chosen:
            header = IRHeader(0, int(labels[i]), i, 0)
            writer.write(pack(header, png(images_NHW[i])), key=i)
    data = path.read_bytes()
    sha256 = hashlib.sha256(data).hexdigest()
    return f"| {path.name} | {len(chosen)} | {len(data)} | {sha256} |\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("original", type=Path, metavar="PATH/fashion_mnist.npz")
    arrays = np.load(parser.parse_args().original, allow_pickle=False)
    rows = [
        pack_split(
            arrays[f"x_{source}"],
            arrays[f"y_{source}"],
            num_each,
            FOLDER / f"fashion_mnist_{name}.rec",
        )
        for name, source, num_each in SPLITS
    ]
    classes = "".join(f"{name}\n" for name in arrays["classes"])
    (FOLDER / "fashion_mnist.classes.txt").write_text(classes, encoding="utf-8")
    origin = ORIGIN.format(pillow=PIL.__version__) + "".join(rows)
    (FOLDER / "ORIGIN.md").write_text(origin, encoding="utf-8")
    print("".join(rows), end="")


if __name__ == "__main__":
    main()
