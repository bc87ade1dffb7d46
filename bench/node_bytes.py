"""Bytes that nodes with caches of their own fetch together, per byte of the data: with and without streams.

    python bench/node_bytes.py [--images N] [--batch N] [--window N] [--nodes N,...] [--record]

Made JPEG files of 32 pixels, packed by `flambeau pack` into 8 shards of tar, lie in a store on loopback
(s3_server.py). A block is made as small as 70 of them, which 8 MiB hold of photographs of 115 KB, and a node
keeps none open that its cache has removed. Each node is a process of its own, which reads two epochs by
`wrap`, as one of so many ranks, with a cache of its own: one that holds all of the data, or 1.1 of the share
of a node, and 5 blocks. The streams are 48, as they are, or 1: all blocks of a window mix over all nodes.
Counted are the bytes that the store has sent in each epoch. A row also has the blocks in the fullest cache,
and seconds until the first batch, the imports among them.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from provenance import commit, cpu_model, record  # beside this script
from remote_stream import server

BUCKET, BLOCK_IMAGES, SHARDS = "bench", 70, 8
STREAMS = (1, 48)


def make_images(folder: Path, count: int) -> None:
    """Images of noise in ten classes."""
    import numpy as np
    from PIL import Image

    draw = np.random.default_rng(0)
    for number in range(count):
        path = folder / f"{number % 10}" / f"{number:06}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = draw.integers(0, 255, (32, 32, 3), np.uint8)
        Image.fromarray(pixels).save(path, quality=75)


def make_store(folder: Path, count: int) -> tuple[int, int]:
    """Pack the images below `folder`/BUCKET; the bytes of the shards, and of the images alone."""
    import flambeau.cli.command

    with tempfile.TemporaryDirectory(dir=folder) as photos:
        make_images(Path(photos), count)
        alone = sum(path.stat().st_size for path in Path(photos).rglob("*.jpg"))
        (folder / BUCKET).mkdir()
        words = ["pack", photos, f"{folder / BUCKET}/made.tar", "--shards", f"{SHARDS}"]
        assert flambeau.cli.command.main(words) == 0
    return sum(path.stat().st_size for path in (folder / BUCKET).glob("*.tar")), alone


def bytes_of(url: str) -> int:
    """That the store has sent since it was asked last."""
    with urllib.request.urlopen(f"{url}/-/figures") as answer:
        return int(json.load(answer)["bytes"])


def node(told: dict[str, Any]) -> None:
    """Reads two epochs as one node; after each, and before the first, a line is printed and one awaited."""
    import torch
    import torch.distributed as dist

    from flambeau import wrap
    from flambeau.data.sources import block_shuffle, sample_blocks
    from flambeau.data.stores import block_cache

    torch.set_num_threads(1)
    sample_blocks.BLOCK_BYTES = told["block_bytes"]
    block_shuffle.STREAMS = told["streams"]
    block_cache._OPEN = 1
    dist.is_initialized = lambda: True
    dist.get_world_size = lambda group=None: told["nodes"]
    dist.get_rank = lambda group=None: told["node"]
    batches = wrap(
        f"s3://{BUCKET}/made.tar",
        lambda image: torch.tensor(image.size),
        batch_size=told["batch"],
        seed=told["seed"],
        shuffle_window=told["window"],
        cache=told["cache"],
        cache_size=told["cache_size"],
    )
    for epoch in range(2):
        print("ready", flush=True)
        input()
        begun = time.monotonic()
        first_s = 0.0
        count = 0
        for sizes in batches:
            first_s = first_s or time.monotonic() - begun
            count += len(sizes[0])
        blocks = sum(path.is_file() for path in Path(told["cache"], "blocks").rglob("*"))
        found = {"epoch": epoch, "images": count, "first_batch_s": first_s, "blocks": blocks}
        print(json.dumps(found), flush=True)


def turn(folder: Path, url: str, told: dict[str, Any]) -> list[dict[str, Any]]:
    """The figures of two epochs of all nodes."""
    environ = os.environ | {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "bench",
        "AWS_SECRET_ACCESS_KEY": "bench",
        "AWS_DEFAULT_REGION": "us-east-1",
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.TemporaryDirectory(dir=folder) as caches, contextlib.ExitStack() as stack:
        jobs = []
        for number in range(told["nodes"]):
            words = json.dumps({**told, "node": number, "cache": f"{caches}/{number}"})
            process = subprocess.Popen(
                [sys.executable, __file__, "--node", words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environ,
            )
            jobs.append(stack.enter_context(process))
        rows = []
        for epoch in range(2):
            assert [line_of(job) for job in jobs] == ["ready"] * len(jobs)
            bytes_of(url)  # the index is not counted: each node reads it
            for job in jobs:
                assert job.stdin is not None
                job.stdin.write("\n")
                job.stdin.flush()
            found = [json.loads(line_of(job)) for job in jobs]
            assert sum(one["images"] for one in found) == told["images"]
            rows.append(
                {
                    "epoch": epoch,
                    "fetched_per_byte": round(bytes_of(url) / told["bytes"], 4),
                    "blocks_in_a_cache": max(one["blocks"] for one in found),
                    "first_batch_s": round(max(one["first_batch_s"] for one in found), 2),
                }
            )
    return rows


def line_of(job: "subprocess.Popen[str]") -> str:
    assert job.stdout is not None
    return job.stdout.readline().strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--images", type=int, default=20_480)
    parser.add_argument("--batch", type=int, default=384)
    parser.add_argument("--window", type=int, default=4096)
    parser.add_argument("--nodes", default="1,2,3,4,8")
    parser.add_argument("--node", help=argparse.SUPPRESS)
    parser.add_argument("--record", action="store_true", help="append to bench/results")
    told = parser.parse_args()
    if told.node is not None:
        node(json.loads(told.node))
        return
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        size, alone = make_store(folder, told.images)
        block_bytes = BLOCK_IMAGES * alone // told.images
        with server(folder, "plain") as url:
            for nodes in map(int, told.nodes.split(",")):
                for streams in STREAMS:
                    for holds, share in (("all", 2.0), ("share", 1.1 / nodes)):
                        blocks = share * told.images / BLOCK_IMAGES + 5
                        kilobytes = int(blocks * block_bytes) // 1000
                        facts = {
                            "nodes": nodes,
                            "streams": streams,
                            "images": told.images,
                            "bytes": size,
                            "batch": told.batch,
                            "window": told.window,
                        }
                        how = {
                            "block_bytes": block_bytes,
                            "cache_size": f"{kilobytes}KB",
                            "seed": 0,
                        }
                        for row in turn(folder, url, {**facts, **how}):
                            more = {
                                "block_bytes": block_bytes,
                                "cpu": cpu_model(),
                                "commit": commit(),
                            }
                            line = {**facts, "cache_holds": holds, **row, **more}
                            record(line, __file__, keep=told.record)


if __name__ == "__main__":
    main()
