"""`flambeau verify s3://...`: each image of shards in a store against the CRC-32 of their index."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from flambeau.data.pack.pack import map_in_order
from flambeau.data.pack.salvage_records import ScannedRecord
from flambeau.data.pack.verify import Damage, FileReport, check_image, judge
from flambeau.data.sources.open_store import IndexedShard
from flambeau.data.sources.path_format import kind_of_name
from flambeau.data.sources.shard_index import ShardPart
from flambeau.data.sources.store_shards import StoreShard
from flambeau.data.stores.address import name_of
from flambeau.data.stores.block_cache import CacheOptions
from flambeau.data.stores.store import Missing, store
from flambeau.images.decode import Stored

_OTHER = "its bytes are not what was packed"


def verify_shard(
    shard: IndexedShard,
    *,
    deep: bool = False,
    workers: int = 1,
    say: Callable[[Damage], None] = lambda _: None,
) -> FileReport:
    """Read a whole shard, not from the cache; StoreFault: no answer, or a refusal."""
    report = FileReport(shard.address, str(kind_of_name(name_of(shard.address))), checksums=True)
    damages: list[tuple[Damage, bool | None]] = []
    with ThreadPoolExecutor(workers, thread_name_prefix="verify") as pool:
        check = partial(check_image, deep=deep)
        for record in map_in_order(pool, check, _records(shard), ahead=4 * workers):
            if record.damage is None:
                report.good += 1
                continue
            damage = Damage(record.name, None, record.damage)
            # What was packed was read then: undecided damage is damage.
            damages.append((damage, bool(record.whole)))
            say(damage)
    judge(report, damages)
    return report


def _records(shard: IndexedShard) -> Iterator[ScannedRecord]:
    try:
        size = store().facts(shard.address).size
    except Missing:
        yield ScannedRecord("the file", None, damage="it is not there")
        return
    if size != shard.facts.size:
        what = f"it has {size:,} bytes, and had {shard.facts.size:,} when it was packed"
        yield ScannedRecord("the file", None, damage=what)
        return
    for part in shard.facts.parts:
        files = StoreShard(shard.address, part, CacheOptions(), index_of=shard.index_of).files
        for index, contents in enumerate(files.contents()):
            name = part.images.tails[index].lstrip(", ") or f"image {index}"
            if None in contents:
                yield ScannedRecord(name, None, damage=_OTHER)
                continue
            image, *masks = (content or b"" for content in contents)
            yield ScannedRecord(
                name, None, _stored(part, index, image), masks[0] if masks else None
            )


def _stored(part: ShardPart, index: int, data: bytes) -> Stored:
    shape = None if part.shapes is None else part.shapes[index]
    if shape is None or not shape.any():
        return data
    return np.frombuffer(data, np.uint8).reshape(shape)
