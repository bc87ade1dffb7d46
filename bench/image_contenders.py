"""Ours, torchvision's, timm's and OpenCV's loaders for bench/image_loader.py; others are in image_peers.py.

Each takes the folder of photographs, with a sub-folder a class, and a folder to work in, and returns what
makes the batches of an epoch.
"""

import random
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

SIZE, BATCH, SCALE = 224, 64, (0.08, 1.0)
Batches = Callable[[int], Iterable[Any]]  # of an epoch


def flambeau(folder: Path, work: Path) -> Batches:
    from flambeau.data.sources.folder import FolderSource

    return flambeau_loader(FolderSource(folder))


def flambeau_simplejpeg(folder: Path, work: Path) -> Batches:
    """As where there was no compiler."""
    without_kernel()
    return flambeau(folder, work)


def without_kernel() -> None:
    from flambeau.images.native import kernel

    kernel.kernel = lambda: None  # type: ignore[assignment]


def flambeau_packed(folder: Path, work: Path) -> Batches:
    """JPEGs cut losslessly into segments, read by the compiled kernel."""
    return packed(folder, work)


def flambeau_packed_resized(folder: Path, work: Path) -> Batches:
    """As many keep ImageNet: 256 pixels on the shorter side, encoded anew."""
    return packed(folder, work, "--resize", "256")


def packed(folder: Path, work: Path, *options: str) -> Batches:
    from flambeau.data.sources.open_data import open_parts

    return flambeau_loader(open_parts(segments(folder, work, *options))[0])


def segments(folder: Path, work: Path, *options: str) -> Path:
    from flambeau.images.native import kernel

    if kernel.kernel() is None:
        raise ImportError(f"no kernel: {kernel.kernel_status()}")
    target = work / "images.rec"
    command = [sys.executable, "-m", "flambeau", "pack", str(folder), str(target), "--segments"]
    subprocess.run([*command, *options], check=True, capture_output=True)
    return target


def flambeau_packed_simplejpeg(folder: Path, work: Path) -> Batches:
    """The same file as where there is no kernel: an ordinary JPEG."""
    batches = flambeau_packed(folder, work)
    without_kernel()
    return batches


def flambeau_raw(folder: Path, work: Path) -> Batches:
    """Decoded pixels in one mapped file, some six times the bytes."""
    from flambeau.data.sources.folder import FolderSource
    from flambeau.images.decode import decode

    source = FolderSource(folder)
    shapes, at = [], [0]
    with (work / "pixels").open("wb") as file:
        for index in range(len(source)):
            pixels = decode(source.read(index), channels=3)
            shapes.append(pixels.shape)
            at.append(at[-1] + pixels.size)
            file.write(pixels)
    mapped = np.asarray(np.memmap(work / "pixels", np.uint8, "r"))
    images = [mapped[at[k] : at[k + 1]].reshape(shape) for k, shape in enumerate(shapes)]
    int(sum(image[::8].sum() for image in images))  # into the page cache, and into this process
    source.read = images.__getitem__  # type: ignore[method-assign,assignment]
    return flambeau_loader(source)


def flambeau_loader(source: Any) -> Batches:
    from flambeau.data.datasets.image_dataset import ImageDataset
    from flambeau.data.loading.batch_layout import BatchLayout
    from flambeau.data.loading.loader import Loader
    from flambeau.data.transforms.crops import TrainingCrop

    dataset = ImageDataset(
        source, image_size=SIZE, channels=3, train=True, crop=TrainingCrop(scale=SCALE)
    )
    loader = Loader(dataset, BatchLayout(BATCH))
    return lambda epoch: (
        batch.data[0] for batch in loader.stream(epoch=epoch, position=0, epochs=1)
    )


def limit(folder: Path, work: Path) -> Batches:
    """Nothing but what libjpeg-turbo takes to decode the same crops in full, from memory."""
    from flambeau.data.transforms.crops import random_resized_crop_box
    from flambeau.images.decode import Picture

    without_kernel()
    pictures = [Picture(path.read_bytes()) for path in files(folder)]

    def batches(epoch: int) -> Iterator[Any]:
        for number, picture in enumerate(pictures):
            seed = epoch * len(pictures) + number
            box = random_resized_crop_box(picture.height, picture.width, seed, scale=SCALE)
            yield picture.pixels(box, channels=3)[None]

    return batches


def torchvision_v1(folder: Path, work: Path) -> Batches:
    from torchvision import datasets

    return torch_loader(datasets.ImageFolder(str(folder), pil_transform()))


def fast(folder: Path, work: Path, *, copy: Path | None = None) -> Batches:
    """The same line of torchvision's, read by `flambeau.data.fast`."""
    from torch.utils.data import DataLoader
    from torchvision import datasets

    from flambeau.data.fast import fast

    data = datasets.ImageFolder(str(folder), pil_transform())
    loader = fast(DataLoader(data, BATCH, shuffle=True), threads=1, packed=copy)
    return lambda epoch: (images for images, _ in loader)


def fast_packed(folder: Path, work: Path) -> Batches:
    return fast(folder, work, copy=segments(folder, work))


def torchvision_v1_float(folder: Path, work: Path) -> Batches:
    from torchvision import datasets, transforms

    normalize = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    steps = [*pil_transform().transforms[:2], transforms.ToTensor(), normalize]
    return torch_loader(datasets.ImageFolder(str(folder), transforms.Compose(steps)))


def torchvision_v2(folder: Path, work: Path) -> Batches:
    from torchvision import datasets
    from torchvision.transforms import v2

    steps = [v2.RandomResizedCrop(SIZE, SCALE), v2.RandomHorizontalFlip(), v2.PILToTensor()]
    return torch_loader(datasets.ImageFolder(str(folder), v2.Compose(steps)))


def torchvision_v2_tensor(folder: Path, work: Path) -> Batches:
    from torchvision import datasets
    from torchvision.io import decode_image

    data = datasets.ImageFolder(
        str(folder), tensor_transform(), loader=lambda path: decode_image(path, mode="RGB")
    )
    return torch_loader(data)


def timm(folder: Path, work: Path) -> Batches:
    import torch
    from timm.data import create_dataset, create_loader

    loader = create_loader(
        create_dataset("folder", str(folder), is_training=True), (3, SIZE, SIZE), BATCH,
        is_training=True, scale=SCALE, color_jitter=None, interpolation="bilinear", num_workers=0,
        persistent_workers=False, pin_memory=False, device=torch.device("cpu"),
    )  # fmt: skip
    loader.loader.batch_sampler.drop_last = False
    return lambda epoch: (images for images, _ in loader.loader)  # uint8, before it normalises


def opencv(folder: Path, work: Path) -> Batches:
    import cv2

    cv2.setNumThreads(0)
    crop_box, paths = box_drawer(), files(folder)

    class Photos:
        def __len__(self) -> int:
            return len(paths)

        def __getitem__(self, index: int) -> tuple[Any, int]:
            pixels = cv2.imread(str(paths[index]), cv2.IMREAD_COLOR_RGB)
            top, left, height, width = crop_box(*pixels.shape[:2])
            crop = cv2.resize(pixels[top : top + height, left : left + width], (SIZE, SIZE))
            return np.ascontiguousarray(crop[:, ::-1] if random.random() < 0.5 else crop), 0

    return torch_loader(Photos())


CONTENDERS: dict[str, tuple[Callable[[Path, Path], Batches], str]] = {
    # name: (what makes its batches, distribution it needs, whose version is told)
    "torchvision-v1": (torchvision_v1, "torchvision"),
    "flambeau": (flambeau, "simplejpeg"),
    "flambeau-simplejpeg": (flambeau_simplejpeg, "simplejpeg"),
    "flambeau-packed": (flambeau_packed, "simplejpeg"),
    "flambeau-packed-resized": (flambeau_packed_resized, "simplejpeg"),
    "flambeau-packed-simplejpeg": (flambeau_packed_simplejpeg, "simplejpeg"),
    "flambeau-raw": (flambeau_raw, "numpy"),
    "fast": (fast, "simplejpeg"),
    "fast-packed": (fast_packed, "simplejpeg"),
    "limit": (limit, "simplejpeg"),
    "torchvision-v1-float": (torchvision_v1_float, "torchvision"),
    "torchvision-v2": (torchvision_v2, "torchvision"),
    "torchvision-v2-tensor": (torchvision_v2_tensor, "torchvision"),
    "timm": (timm, "timm"),
    "opencv": (opencv, "opencv-python-headless"),
}


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def pil_transform() -> Any:
    from torchvision import transforms

    return transforms.Compose(
        [
            transforms.RandomResizedCrop(SIZE, SCALE),
            transforms.RandomHorizontalFlip(),
            transforms.PILToTensor(),
        ]
    )


def tensor_transform() -> Any:
    from torchvision.transforms import v2

    crop = v2.RandomResizedCrop(SIZE, SCALE, antialias=True)
    return v2.Compose([crop, v2.RandomHorizontalFlip()])


def box_drawer() -> Callable[[int, int], tuple[int, int, int, int]]:
    import torch
    from torchvision.transforms import RandomResizedCrop

    def draw(height: int, width: int) -> tuple[int, int, int, int]:
        image = torch.empty(1, 1, 1).expand(1, height, width)
        return RandomResizedCrop.get_params(image, list(SCALE), [3 / 4, 4 / 3])

    return draw


def torch_loader(data: Any, *, shuffle: bool = True) -> Batches:
    from torch.utils.data import DataLoader

    loader = DataLoader(data, BATCH, shuffle=shuffle)
    return lambda epoch: (images for images, _ in loader)
