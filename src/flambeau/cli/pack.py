"""`flambeau pack`: labelled images from any source into a packed file, or back into a folder."""

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from flambeau.cli.flags_from_settings import TARGETS, add_target_flags, given_targets
from flambeau.cli.reading_flags import (
    add_cache_flags,
    add_download,
    cache_of_flags,
    check_at_least,
)
from flambeau.cli.table import print_json
from flambeau.data.sources.data_names import refuse_output
from flambeau.errors import InputError
from flambeau.terminal import print_text, printable, say
from flambeau.trainer.settings.settings import Settings

if TYPE_CHECKING:
    from flambeau.data.pack.encode_images import Conversion
    from flambeau.data.pack.output_files import Packed
    from flambeau.data.pack.shard_plan import Split

HELP = "convert labelled images between formats, in parallel; the same command again continues it"

_SHOWN_BAD = 20  # lines about images that were left out; DST.pack.json has all


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from flambeau.data.sources.packed_formats import endings_of

    add = parser.add_argument
    add(
        "src",
        metavar="SRC",
        help="whatever `flambeau train` takes as DATA; COCO's .json of polygons",
    )
    add(
        "dst",
        metavar="DST",
        help=f"what to make: NAME{endings_of('files', 'both', 'pixels')}, also in a store, or a folder; of "
        "polygons NAME.csv",
    )
    # No format here can keep which images belong together.
    kept = [name for name in TARGETS if name != "group"]
    add_target_flags(parser.add_argument_group("data"), kept)
    _add_images(parser.add_argument_group("images"))
    _add_files(parser.add_argument_group("files"))
    work = parser.add_argument_group("work")
    work.add_argument(
        "--workers", type=int, metavar="N", help="threads (default: one for each usable CPU)"
    )
    add_download(work)
    add_cache_flags(work)
    work.add_argument(
        "--fresh", action="store_true", help="start again; a finished DST is renamed, not deleted"
    )


def _add_images(images: argparse._ArgumentGroup) -> None:
    add = images.add_argument
    add("--resize", type=int, metavar="N", help="pixels of the shorter side; never enlarged")
    add("--center-crop", "--square", action="store_true", help="cut out the square in the middle")
    add(
        "--encode",
        choices=("keep", "jpeg", "png", "webp", "bmp", "raw"),
        metavar="{keep,jpeg,png,webp,bmp,raw}",
        help="how images are stored: keep is byte by byte, raw is pixels (default: keep; jpeg with --resize "
        "or --center-crop; raw in arrays)",
    )
    add("--quality", type=int, metavar="Q", help="of JPEG and WebP, 1 to 100 (default: 95)")
    add(
        "--segments",
        action="store_true",
        help="store JPEGs, without loss, so that a part of one can be decoded alone; needs the C kernel",
    )
    add(
        "--skip-bad-images", type=int, default=0, metavar="N", help="unreadable images to leave out"
    )


def _add_files(files: argparse._ArgumentGroup) -> None:
    add = files.add_argument
    add("--shards", type=int, default=1, metavar="N", help="files: NAME-00000-of-0000N.EXT")
    add("--chunks", type=int, default=1, metavar="N", help="equal lots: NAME_0.EXT and so on")
    add(
        "--train-ratio",
        type=float,
        default=1.0,
        metavar="X",
        help="share of NAME_train.EXT; the rest is NAME_val.EXT",
    )
    add("--test-ratio", type=float, default=0.0, metavar="X", help="share of NAME_test.EXT")
    add(
        "--shuffle",
        action=argparse.BooleanOptionalAction,
        help="random order (default: yes with --list, --shards, --chunks or --train-ratio)",
    )
    add("--seed", type=int, metavar="N", help="of that order (default: 100, as im2rec's)")
    add("--list", action="store_true", help="only list the images of a folder, in DST.lst")
    add("--json", action="store_true", help="one JSON object, for programs")


def run(arguments: argparse.Namespace) -> int:
    with cache_of_flags(arguments, arguments.src, arguments.dst):
        return _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    check_at_least(arguments, workers=1, skip_bad_images=0, resize=1, quality=1, seed=0)
    src, dst = Path(arguments.src), Path(arguments.dst)
    if src.suffix.lower() == ".json":
        refuse_output(dst, "DST")
        return _masks(arguments, src, dst)
    _check_takes_effect(arguments, dst)
    if arguments.list:
        refuse_output(dst, "DST")
        return _list(arguments, src, dst)
    from flambeau.data.pack.pack import pack
    from flambeau.recipes.setup.environment import usable_cpus
    from flambeau.trainer.parts.data import target_choice

    packed = pack(
        src,
        dst,
        _conversion(arguments, dst),
        _split(arguments),
        workers=arguments.workers or usable_cpus(),
        skip_bad_images=arguments.skip_bad_images,
        download=arguments.download,
        fresh=arguments.fresh,
        show=True,
        choice=target_choice(Settings(**given_targets(arguments))),
    )
    if arguments.json:
        facts = {**packed._asdict(), "files": list(map(str, packed.files))}
        print_json([facts], readable=True)
    else:
        _report(packed, dst)
    return 0


def _masks(arguments: argparse.Namespace, src: Path, dst: Path) -> int:
    """Masks of polygons, and their table."""
    from flambeau.data.pack.coco_masks import masks_of_coco

    if dst.suffix.lower() != ".csv":
        raise InputError(
            f"{src} holds polygons, of which masks and a table of them are made\n"
            "Name a DST that ends in .csv"
        )
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    plain = vars(parser.parse_args([arguments.src, arguments.dst]))
    given = (k for k, value in plain.items() if k != "json" and getattr(arguments, k) != value)
    if (changed := next(given, None)) is not None:
        raise InputError(
            f"--{changed.replace('_', '-')} has no effect on polygons, whose images stay as they are: "
            "leave it out"
        )
    made = masks_of_coco(src, dst, show=True)
    if arguments.json:
        print_json(
            [{"files": [str(made.table), str(made.names)], "images": made.images}], readable=True
        )
    else:
        print_text(f"{made.images} images and masks in {made.table}, their classes in {made.names}")
        say(f"next: flambeau train {shlex.quote(str(made.table))}")
    return 0


def _check_takes_effect(arguments: argparse.Namespace, dst: Path) -> None:
    """Refuse flags without effect; `_conversion` checks those of the images."""
    from flambeau.data.pack.shard_plan import target_kind
    from flambeau.data.sources.data_names import is_named

    if arguments.download and not is_named(arguments.src):
        raise InputError(
            "--download has no effect without torchvision:NAME or hf:NAME: leave it out"
        )
    if arguments.list:
        for name in (
            "resize",
            "center_crop",
            "encode",
            "quality",
            "segments",
            "skip_bad_images",
            "workers",
        ):
            if getattr(arguments, name):
                flag = name.replace("_", "-")
                raise InputError(f"--{flag} has no effect with --list: leave it out")
    elif (
        target_kind(dst) in ("folder", "lmdb")
        and not _has_several_files(arguments)
        and arguments.shuffle
    ):
        raise InputError(
            f"--shuffle has no effect on {dst}, whose order is that of its names: leave it out"
        )
    if arguments.seed is not None and not _shuffles(arguments):
        without = "with --no-shuffle" if arguments.shuffle is False else "without --shuffle"
        raise InputError(f"--seed has no effect {without}: leave it out")


def _has_several_files(arguments: argparse.Namespace) -> bool:
    """Whether the images go into several files."""
    return bool(arguments.shards > 1 or arguments.chunks > 1 or arguments.train_ratio < 1)


def _shuffles(arguments: argparse.Namespace) -> bool:
    by_default = _has_several_files(arguments) or arguments.list
    return bool(by_default if arguments.shuffle is None else arguments.shuffle)


def _conversion(arguments: argparse.Namespace, dst: Path) -> "Conversion":
    from flambeau.data.pack.encode_images import Conversion
    from flambeau.data.pack.shard_plan import target_kind
    from flambeau.data.sources.packed_formats import FORMATS
    from flambeau.images.native.kernel import require_kernel

    changes = arguments.resize is not None or arguments.center_crop
    encode = arguments.encode
    if encode is None:
        pixels = FORMATS[target_kind(dst)].is_array
        encode = "raw" if pixels else "jpeg" if changes or arguments.quality else "keep"
    if encode == "keep" and changes:
        raise InputError("--encode keep leaves images as they are; leave out --resize and the crop")
    if arguments.quality is not None:
        if arguments.quality > 100:
            raise InputError(f"--quality must be from 1 to 100, got {arguments.quality}")
        if encode not in ("jpeg", "webp"):
            raise InputError(f"--quality is for JPEG and WebP; images are stored as {encode}")
    if arguments.segments:
        if encode not in ("keep", "jpeg"):
            raise InputError(f"--segments is for JPEG; images are stored as {encode}")
        require_kernel("--segments")
    return Conversion(
        encode=encode,
        resize=arguments.resize,
        quality=95 if arguments.quality is None else arguments.quality,
        center_crop=arguments.center_crop,
        keep_small=encode == "jpeg" and arguments.encode is None and arguments.quality is None,
        segments=arguments.segments,
    )


def _split(arguments: argparse.Namespace) -> "Split":
    from flambeau.data.pack.shard_plan import IM2REC_SEED, Split

    return Split(
        shards=arguments.shards,
        chunks=arguments.chunks,
        train_ratio=arguments.train_ratio,
        test_ratio=arguments.test_ratio,
        shuffle=_shuffles(arguments),
        seed=IM2REC_SEED if arguments.seed is None else arguments.seed,
    )


def _list(arguments: argparse.Namespace, src: Path, dst: Path) -> int:
    from flambeau.data.pack.output_files import name_disk_errors, write_classes, write_whole
    from flambeau.data.pack.shard_plan import list_files, named_parts, remarks_on_parts
    from flambeau.data.sources.class_names_file import class_names_path
    from flambeau.trainer.parts.data import target_choice

    choice = target_choice(Settings(**given_targets(arguments)))
    parts = named_parts(src, "list", download=arguments.download, choice=choice)
    texts = list_files(parts, dst, _split(arguments))
    for path in texts:
        if path.exists() and not arguments.fresh:
            raise InputError(f"{path} exists\nName another DST, or give --fresh to write it again")
    classes = parts[0][1].classes
    names_path = class_names_path(next(iter(texts)), classes)
    with name_disk_errors(dst, dst.parent):
        if names_path is not None:
            write_classes(names_path, classes)
        for path, text in texts.items():
            write_whole(path, text)
    counts = {str(path): len(text.splitlines()) for path, text in texts.items()}
    remarks = list(remarks_on_parts(parts, "list"))
    if arguments.json:
        facts = {"files": [*counts], "images": sum(counts.values()), "remarks": remarks}
        print_json([facts], readable=True)
        return 0
    for name, count in counts.items():
        print_text(f"{count} images: {name}")
    for remark in remarks:
        say(remark)
    return 0


def _report(packed: "Packed", dst: Path) -> None:
    from flambeau.data.sources.path_format import whole_name

    for line in packed.bad[:_SHOWN_BAD]:
        say(f"left out: {printable(line)}")
    if len(packed.bad) > _SHOWN_BAD:
        say(f"... and {len(packed.bad) - _SHOWN_BAD} more, see {dst}.pack.json")
    for remark in packed.remarks:
        say(remark)
    already = "already packed: " if packed.already else ""
    files = packed.files
    where = str(files[0]) if len(files) == 1 else f"{len(files)} files, {files[0]} ... {files[-1]}"
    left = f", {len(packed.bad)} left out" if packed.bad else ""
    print_text(f"{already}{packed.images} images in {where}{left}")
    first = files[0]
    whole = str(whole_name(Path(first))) if isinstance(first, Path) else _whole_address(first)
    print_text(f"next: flambeau verify {shlex.quote(whole)}")


def _whole_address(address: str) -> str:
    from flambeau.data.sources.path_format import whole_name
    from flambeau.data.stores.address import beside, name_of

    return beside(address, whole_name(Path(name_of(address))).name)
