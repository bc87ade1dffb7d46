"""Other projects' loaders for bench/image_loader.py, each as its own documentation makes it fast.

Where a loader leaves decoding and augmentation to the user (webdataset, litdata, mosaicml-streaming, grain,
SPDL), it gets the fastest that torchvision documents: decode_image and v2 transforms of uint8 tensors
(torchvision, "Getting started with transforms v2", performance considerations), which were 1.2 to 1.4 times
as fast as PIL here.

FFCV is not in the extra `bench`, because pip compiles it against OpenCV's C++ headers: on Debian and Ubuntu,
`apt install libopencv-dev libturbojpeg0-dev pkg-config` and `pip install ffcv` (1.0.2, Python 3.11).
"""

import math
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from image_contenders import BATCH, SCALE, SIZE, Batches, files, tensor_transform, torch_loader


def torchcodec(folder: Path, work: Path) -> Batches:
    """The decoder that torchvision has named the successor of its own, in place of PIL's; whole images."""
    from torchcodec.decoders import decode_jpeg
    from torchvision.datasets import ImageFolder

    return torch_loader(ImageFolder(str(folder), tensor_transform(), loader=decode_jpeg))


def webdataset(folder: Path, work: Path) -> Batches:
    """Batched by the data set itself, as WebDataset's README has it for speed; undecoded in the tar."""
    import webdataset

    with webdataset.TarWriter(str(work / "photos.tar")) as writer:
        for number, path in enumerate(files(folder)):
            writer.write({"__key__": f"{number:06}", "jpg": path.read_bytes(), "cls": 0})
    data = webdataset.WebDataset(str(work / "photos.tar"), shardshuffle=False).shuffle(100)
    data = data.to_tuple("jpg", "cls").map_tuple(bytes_transform()).batched(BATCH)
    loader = webdataset.WebLoader(data, batch_size=None, num_workers=0)
    return lambda epoch: (images for images, _ in loader)


def litdata(folder: Path, work: Path) -> Batches:
    """Chunks of 64 MB of undecoded JPEGs (README, "Optimize the data"); its own decoding is 5 % slower."""
    from litdata import StreamingDataLoader, StreamingDataset, optimize

    optimize(
        Path.read_bytes, files(folder), str(work / "chunks"), chunk_bytes="64MB", num_workers=1
    )

    class Photos(StreamingDataset):
        def __getitem__(self, index: Any) -> Any:
            return transform(super().__getitem__(index))

    transform = bytes_transform()
    photos = Photos(str(work / "chunks"), shuffle=True)
    loader = StreamingDataLoader(photos, batch_size=BATCH, num_workers=0)
    return lambda epoch: loader


def streaming(folder: Path, work: Path) -> Batches:
    """Shards without compression, which JPEGs do not need; local, so that nothing is downloaded."""
    from streaming import MDSWriter, StreamingDataset

    with MDSWriter(out=str(work / "mds"), columns={"x": "bytes"}) as writer:
        for path in files(folder):
            writer.write({"x": path.read_bytes()})

    class Photos(StreamingDataset):
        def __getitem__(self, index: Any) -> Any:
            return transform(super().__getitem__(index)["x"]), 0

    transform = bytes_transform()
    data = Photos(local=str(work / "mds"), shuffle=True, batch_size=BATCH)
    return torch_loader(data, shuffle=False)


def grain(folder: Path, work: Path) -> Batches:
    """The Dataset API with reading threads, here one (Grain, "Dataset basics")."""
    import grain

    transform, paths = bytes_transform(), files(folder)
    data = grain.MapDataset.source(paths).shuffle(seed=0)
    data = data.map(lambda path: transform(path.read_bytes()).numpy()).batch(BATCH)
    return lambda epoch: data.to_iter_dataset(grain.ReadOptions(num_threads=1))


def spdl(folder: Path, work: Path) -> Batches:
    """A pipeline of threads, here one; torchvision's functions in it, which hold no lock, as the migration
    guide has it. spdl.io's own decoder (FFmpeg) was slower by a quarter."""
    import torch
    from spdl.pipeline import PipelineBuilder

    transform, paths = bytes_transform(), files(folder)

    def batches(epoch: int) -> Iterator[Any]:
        builder = PipelineBuilder().add_source(random.sample(paths, len(paths)))
        builder = builder.pipe(lambda path: transform(path.read_bytes())).aggregate(BATCH)
        pipeline = builder.pipe(torch.stack).add_sink(2).build(num_threads=1)
        with pipeline.auto_stop():
            yield from pipeline

    return batches


def dali(folder: Path, work: Path) -> Batches:
    """Decoder fused with the crop, as in DALI's ImageNet examples; one thread, the default prefetching.

    The accurate IDCT and the antialiased resize are the defaults; the fast IDCT gave nothing.
    """
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali.plugin.base_iterator import LastBatchPolicy
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    @pipeline_def(batch_size=BATCH, num_threads=1, device_id=None)
    def pipeline() -> Any:
        encoded, _ = fn.readers.file(
            file_root=str(folder), random_shuffle=True, name="photos", initial_fill=256
        )
        crops = fn.decoders.image_random_crop(
            encoded, device="cpu", output_type=types.RGB, random_area=SCALE
        )
        crops = fn.resize(crops, size=(SIZE, SIZE))
        return fn.flip(crops, horizontal=fn.random.coin_flip())

    built = pipeline()
    built.build()
    loader = DALIGenericIterator(
        built, ["x"], reader_name="photos", auto_reset=True,
        last_batch_policy=LastBatchPolicy.PARTIAL,
    )  # fmt: skip
    return lambda epoch: (batch[0]["x"] for batch in loader)


def tf_data(folder: Path, work: Path, *, antialias: bool = False) -> Batches:
    """Decoder fused with the crop and the fast IDCT, as TensorFlow's ResNet for ImageNet has it; one thread.

    TensorFlow resizes without antialiasing by default: less work than the others do. Its own
    sample_distorted_bounding_box draws heights evenly, so its crops are a sixth smaller than the others'.
    """
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)

    def window(shape: Any) -> Any:
        """As torchvision's RandomResizedCrop draws it: the first of ten that fits, or all."""
        height, width = tf.cast(shape[0], tf.float32), tf.cast(shape[1], tf.float32)
        area = height * width * tf.random.uniform([10], *SCALE)
        shape_of = tf.exp(tf.random.uniform([10], math.log(3 / 4), math.log(4 / 3)))
        sides = tf.round(tf.sqrt(tf.stack([area / shape_of, area * shape_of], 1)))
        sides = tf.concat([sides, [[height, width]]], 0)
        size = sides[tf.argmax(tf.reduce_all(sides <= [height, width], 1))]
        begin = tf.floor(tf.random.uniform([2]) * ([height, width] - size + 1))
        return tf.cast(tf.concat([begin, size], 0), tf.int32)

    def load(path: Any) -> Any:
        encoded = tf.io.read_file(path)
        box = window(tf.image.extract_jpeg_shape(encoded))
        crop = tf.io.decode_and_crop_jpeg(encoded, box, channels=3, dct_method="INTEGER_FAST")
        crop = tf.image.random_flip_left_right(crop)
        return tf.cast(tf.image.resize(crop, (SIZE, SIZE), antialias=antialias), tf.uint8)

    paths = [str(path) for path in files(folder)]
    data = tf.data.Dataset.from_tensor_slices(paths).shuffle(len(paths))
    data = data.map(load, num_parallel_calls=1, deterministic=False).batch(BATCH).prefetch(1)
    options = tf.data.Options()
    options.threading.private_threadpool_size = 1
    return lambda epoch: data.with_options(options).as_numpy_iterator()


def tf_data_antialias(folder: Path, work: Path) -> Batches:
    return tf_data(folder, work, antialias=True)


def ffcv(folder: Path, work: Path, *, stored_as: str = "jpg") -> Batches:
    """Its own file, in which images are encoded anew with its default quality, 90, or are pixels; read as in
    its ImageNet example, on one thread. It resizes with OpenCV's INTER_AREA, which averages as well.
    """
    from ffcv.fields import IntField, RGBImageField
    from ffcv.fields.rgb_image import RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import RandomHorizontalFlip, ToTensor, ToTorchImage
    from ffcv.writer import DatasetWriter
    from torchvision.datasets import ImageFolder

    file = str(work / "photos.beton")
    fields = {"x": RGBImageField(write_mode=stored_as), "y": IntField()}
    DatasetWriter(file, fields, num_workers=1).from_indexed_dataset(ImageFolder(str(folder)))
    crop = RandomResizedCropRGBImageDecoder((SIZE, SIZE), scale=SCALE)
    steps = [crop, RandomHorizontalFlip(), ToTensor(), ToTorchImage()]
    loader = Loader(
        file, BATCH, num_workers=1, os_cache=True, order=OrderOption.RANDOM, drop_last=False,
        pipelines={"x": steps, "y": None},
    )  # fmt: skip
    return lambda epoch: (batch[0] for batch in loader)


def ffcv_raw(folder: Path, work: Path) -> Batches:
    return ffcv(folder, work, stored_as="raw")


def bytes_transform() -> Any:
    """Bytes of a JPEG to the augmented image, (C, H, W) uint8."""
    import torch
    from torchvision.io import decode_image

    transform = tensor_transform()

    def of_bytes(data: bytes) -> Any:
        return transform(decode_image(torch.frombuffer(data, dtype=torch.uint8), mode="RGB"))

    return of_bytes


PEERS = {
    # name: (what makes its batches, distribution it needs, whose version is told)
    "torchcodec": (torchcodec, "torchcodec"),
    "webdataset": (webdataset, "webdataset"),
    "litdata": (litdata, "litdata"),
    "mosaicml-streaming": (streaming, "mosaicml-streaming"),
    "grain": (grain, "grain"),
    "spdl": (spdl, "spdl"),
    "dali": (dali, "nvidia-dali-cuda130"),
    "tf.data": (tf_data, "tensorflow-cpu"),
    "tf.data-antialias": (tf_data_antialias, "tensorflow-cpu"),
    "ffcv": (ffcv, "ffcv"),
    "ffcv-raw": (ffcv_raw, "ffcv"),
}
