"""The process in which tensorstore runs: it answers requests from standard input on standard output.

Source: tensorstore's Python API. `tensorstore_file` runs this file alone, without the package; nothing
imports it.
A request is the name of a function below and its arguments, a reply (True, its result) or (False, the error);
both are pickled, and both ends are ours.
"""

import pickle
import sys
from functools import cache, lru_cache
from typing import Any

import numpy as np

# Bytes of recently read chunks that are kept: rows read in order unpack each chunk once.
_CACHE = 1 << 27
_SHARD = 256  # images per file of a Zarr store: a folder of a million files is a burden; chosen, untested


@cache
def _context() -> Any:
    import tensorstore

    limits = {"cache_pool": {"total_bytes_limit": _CACHE}, "data_copy_concurrency": {"limit": 1}}
    return tensorstore.Context(limits)


@lru_cache(maxsize=64)
def _opened(folder: str, driver: str, is_reversed: bool, when: int) -> Any:
    import tensorstore

    spec = {"driver": driver, "kvstore": {"driver": "file", "path": folder}}
    spec |= {"recheck_cached_data": "open", "recheck_cached_metadata": "open"}
    store = tensorstore.open(spec, read=True, context=_context()).result()
    return store.T if is_reversed else store


def facts(*where: Any) -> tuple[Any, ...]:
    """Shape and type of an array, the shape of its chunks, and of a chunk file."""
    store = _opened(*where)
    layout = store.chunk_layout
    dtype = store.dtype.numpy_dtype.str
    return store.shape, dtype, layout.read_chunk.shape, layout.write_chunk.shape


def rows(start: int, stop: int, *where: Any) -> Any:
    """Rows start .. stop - 1 of an array, row-major."""
    return _opened(*where)[start:stop].read(order="C").result()


def write(folder: str, driver: str, data: str | bytes, shape: tuple[int, ...], dtype: str) -> None:
    """Write an array from `data`, or the file of that name; with several axes a chunk per row."""
    import tensorstore

    array: Any
    if isinstance(data, str):
        array = np.memmap(data, dtype, "r", shape=shape)
        step = _SHARD
    else:
        array = np.frombuffer(data, dtype).reshape(shape)
        step = shape[0]
    row = (1, *shape[1:]) if len(shape) > 1 else shape
    if driver == "n5":  # lists the fastest axis first
        codec = {"type": "raw"}
        metadata = {"dimensions": shape[::-1], "blockSize": row[::-1], "compression": codec}
        metadata["dataType"] = dtype
    else:
        little = {"name": "bytes", "configuration": {"endian": "little"}}
        inner = [{"name": "bytes"} if dtype == "uint8" else little, {"name": "crc32c"}]
        shards = {"chunk_shape": row, "codecs": inner, "index_codecs": [little, {"name": "crc32c"}]}
        grid = {"chunk_shape": (step, *shape[1:])}
        metadata = {
            "shape": shape,
            "data_type": dtype,
            "chunk_grid": {"name": "regular", "configuration": grid},
            "codecs": [{"name": "sharding_indexed", "configuration": shards}],
        }
    spec = {"driver": driver, "kvstore": {"driver": "file", "path": folder}, "metadata": metadata}
    store = tensorstore.open(spec, create=True, context=_context()).result()
    store = store.T if driver == "n5" else store
    for start in range(0, shape[0], step):
        stop = min(start + step, shape[0])
        store[start:stop].write(array[start:stop]).result()


def serve() -> None:
    """Answer requests until the input ends."""
    functions = {function.__name__: function for function in (facts, rows, write)}
    while True:
        try:
            name, *arguments = pickle.load(sys.stdin.buffer)
        except EOFError:  # the calling process has ended
            return
        try:
            reply = True, functions[name](*arguments)
        except Exception as error:  # raised again by the caller
            # The part after the bracket is a location in tensorstore's source.
            reply = False, str(error).partition(" [")[0]
        pickle.dump(reply, sys.stdout.buffer, pickle.HIGHEST_PROTOCOL)
        sys.stdout.buffer.flush()
