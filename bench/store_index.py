"""The index of a large set in a store, and the order of an epoch: seconds and memory.

    python bench/store_index.py [--shards N] [--samples N] [--record]

An index as `flambeau pack --shards` writes it is made up in a temporary folder: 10,000 shards and ten million
images of 1,000 classes, of the sizes of photographs. A process of its own then does what `flambeau train`
does before the first batch: it reads the index, makes the sources of the shards, and draws the order of an
epoch in two levels. `resident_MB` is the growth of the largest resident memory over that after the imports,
with the file of the index itself (`file_MB`) in it while that is read; `kept_MB` is the growth at the end,
and `anonymous_MB` what of it is no page of a file, which the system may take away.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from provenance import commit, cpu_model, record  # beside this script

CLASSES = tuple(f"n{number:08}" for number in range(1000))


def made_up(num_shards: int, num_samples: int) -> bytes:
    """The content of an index file."""
    from flambeau.data.sources.shard_index import (
        Places,
        ShardIndex,
        ShardPart,
        Texts,
        write_index,
    )

    draw = np.random.default_rng(0)
    each = num_samples // num_shards
    shards = []
    for shard in range(num_shards):
        labels = draw.integers(0, len(CLASSES), each)
        sizes = draw.integers(20_000, 210_000, each)
        numbers = range(shard * each, (shard + 1) * each)
        names = "".join(
            f"{CLASSES[label]}/ILSVRC2012_train_{number:08}\0"
            for number, label in zip(numbers, labels.tolist(), strict=True)
        )
        tails = "".join(f", {name}.JPEG\0" for name in names.split("\0")[:-1])
        part = ShardPart(
            task="classification",
            separator=None,
            classes=CLASSES,
            fingerprint=f"{shard:064x}",
            names=Texts(np.frombuffer(names.encode(), np.uint8)),
            labels=torch.from_numpy(labels),
            images=Places(
                tails=Texts(np.frombuffer(tails.encode(), np.uint8)),
                offsets=np.cumsum(sizes + 1536) - sizes,
                sizes=sizes,
                crcs=draw.integers(0, 1 << 32, each, np.uint32),
                inline={},
            ),
            shapes=None,
            left_out={},
        )
        name = f"photos-{shard:05}-of-{num_shards:05}.tar"
        shards.append(ShardIndex(name, int(sizes.sum()) + 1536 * (each + 2), (part,)))
    return write_index(shards)


WORK = """
import json, sys, time
from pathlib import Path
from flambeau.data.sources.block_shuffle import WINDOW, block_sampler
from flambeau.data.sources.open_data import open_parts

def memory(name):
    text = Path("/proc/self/status").read_text()
    return int(text.partition(name + ":")[2].split()[0]) / 1000

before = memory("VmRSS")
anonymous = memory("RssAnon")
began = time.perf_counter()
began_cpu = time.process_time()
source, _ = open_parts(Path(sys.argv[1]))
opened = time.perf_counter()
opened_cpu = time.process_time()
sampler = block_sampler(source, window=WINDOW, seed=0)
order = sampler.order(0)
done = time.perf_counter()
assert len(order) == len(source) == len(source.labels)
print(json.dumps({
    "open_s": round(opened - began, 2),
    "open_cpu_s": round(opened_cpu - began_cpu, 2),
    "order_s": round(done - opened, 2),
    "order_cpu_s": round(time.process_time() - opened_cpu, 2),
    "anonymous_MB": round(memory("RssAnon") - anonymous),
    "kept_MB": round(memory("VmRSS") - before),
    "resident_MB": round(memory("VmHWM") - before),
    "first": source.describe(int(order[0])).partition(".tar, ")[2],
}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shards", type=int, default=10_000)
    parser.add_argument("--samples", type=int, default=10_000_000)
    parser.add_argument("--record", action="store_true", help="append to bench/results")
    told = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        content = made_up(told.shards, told.samples)
        Path(folder, "photos.tar.flambeau-shards").write_bytes(content)
        made = time.perf_counter() - began
        done = subprocess.run(
            [sys.executable, "-c", WORK, f"file://{folder}/photos.tar"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(done.stderr)
        found = json.loads(done.stdout)
    line = {
        "shards": told.shards,
        "images": told.samples,
        "file_MB": round(len(content) / 1e6),
        "made_s": round(made, 1),
        **found,
        "torch": torch.__version__,
        "cpu": cpu_model(),
        "commit": commit(),
    }
    record(line, __file__, keep=told.record)


if __name__ == "__main__":
    main()
