"""A store on loopback for benches: a folder as the buckets of an S3 server, with a slow or faulty link.

    python bench/s3_server.py FOLDER [--latency-ms MS] [--mb-per-s R] [--faults SHARE]

Answers what reading needs of S3 (ListObjectsV2, HEAD, GET with ranges) and whatever signature comes with it.
All connections share the link: R megabytes (10**6) a second. MS is waited before each answer. Of SHARE of the
GETs of objects, one half is answered 503, the other is cut in the middle of the body; which ones depends on
how many there were before.

The first line printed is its address. GET /-/figures: JSON of the bytes and GETs of objects since the
last time that it was asked for, and the CPU seconds of this process.
"""

import argparse
import asyncio
import email.utils
import random
import time
from collections.abc import Mapping
from pathlib import Path
from xml.sax.saxutils import escape

from aiohttp import web

PIECE = 256 << 10  # bytes written at once


class Link:
    """What all connections share: when its bytes are through, and the counts."""

    def __init__(self, bytes_per_s: float, faults: float) -> None:
        self._bytes_per_s, self._free_at = bytes_per_s, 0.0
        self._faults, self._draw = faults, random.Random(0)
        self.bytes, self.gets, self._cpu_s = 0, 0, time.process_time()

    async def pass_through(self, count: int) -> None:
        self.bytes += count
        if self._bytes_per_s:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + count / self._bytes_per_s
            await asyncio.sleep(self._free_at - now)

    def fault(self) -> str | None:
        self.gets += 1
        draw = self._draw.random()
        return None if draw >= self._faults else "503" if draw < self._faults / 2 else "cut"

    def figures(self) -> dict[str, float]:
        cpu_s = time.process_time()
        said = {"bytes": self.bytes, "gets": self.gets, "cpu_s": cpu_s - self._cpu_s}
        self.bytes, self.gets, self._cpu_s = 0, 0, cpu_s
        return said


class Server:
    def __init__(self, folder: Path, link: Link, latency_s: float) -> None:
        self._folder, self._link, self._latency_s = folder, link, latency_s

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/-/figures":
            return web.json_response(self._link.figures())
        await asyncio.sleep(self._latency_s)
        bucket, _, key = request.path.lstrip("/").partition("/")
        if not (self._folder / bucket).is_dir():
            return _error(404, "NoSuchBucket")
        if not key:
            return self._listing(bucket, request.query)
        path = self._folder / bucket / key
        if not path.is_file():
            return _error(404, "NoSuchKey")
        return await self._object(request, path)

    def _listing(self, bucket: str, query: Mapping[str, str]) -> web.Response:
        prefix = query.get("prefix", "")
        delimiter = query.get("delimiter", "")
        root, rows, folders = self._folder / bucket, [], set()
        for path in sorted(one for one in root.rglob("*") if one.is_file()):
            key = path.relative_to(root).as_posix()
            if not key.startswith(prefix):
                continue
            if delimiter and delimiter in key[len(prefix) :]:
                folders.add(prefix + key[len(prefix) :].partition(delimiter)[0] + delimiter)
                continue
            facts = path.stat()
            when = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(facts.st_mtime))
            rows.append(
                f"<Contents><Key>{escape(key)}</Key><Size>{facts.st_size}</Size>"
                f"<ETag>{escape(_etag(path))}</ETag><LastModified>{when}</LastModified></Contents>"
            )
        rows += [
            f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
            for name in sorted(folders)
        ]
        text = (
            '<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Name>{escape(bucket)}</Name><Prefix>{escape(prefix)}</Prefix>"
            f"<KeyCount>{len(rows)}</KeyCount><IsTruncated>false</IsTruncated>{''.join(rows)}"
            "</ListBucketResult>"
        )
        return web.Response(text=text, content_type="application/xml")

    async def _object(self, request: web.Request, path: Path) -> web.StreamResponse:
        size = path.stat().st_size
        try:
            asked = request.http_range
        except ValueError:
            return _error(416, "InvalidRange")
        start, stop, _ = slice(asked.start, asked.stop).indices(size)
        is_part = "Range" in request.headers
        headers = {
            "Content-Length": str(stop - start),
            "Content-Type": "application/octet-stream",
            "Accept-Ranges": "bytes",
            "ETag": _etag(path),
            "Last-Modified": email.utils.formatdate(path.stat().st_mtime, usegmt=True),
        }
        if is_part:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        fault = self._link.fault() if request.method == "GET" else None
        if fault == "503":
            return _error(503, "SlowDown")
        response = web.StreamResponse(status=206 if is_part else 200, headers=headers)
        await response.prepare(request)
        if request.method == "HEAD":
            return response
        end = (start + stop) // 2 if fault == "cut" else stop
        with path.open("rb") as file:
            file.seek(start)
            while start < end:
                data = file.read(min(PIECE, end - start))
                await self._link.pass_through(len(data))
                await response.write(data)
                start += len(data)
        if fault == "cut" and request.transport is not None:
            request.transport.close()
        return response


def _etag(path: Path) -> str:
    facts = path.stat()
    return f'"{facts.st_size:x}-{facts.st_mtime_ns:x}"'


def _error(status: int, code: str) -> web.Response:
    text = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>{code}</Message></Error>'
    return web.Response(status=status, text=text, content_type="application/xml")


async def serve(server: Server) -> None:
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", server.answer)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    address = runner.addresses[0]
    print(f"http://127.0.0.1:{address[1]}", flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--latency-ms", type=float, default=0)
    parser.add_argument("--mb-per-s", type=float, default=0)
    parser.add_argument("--faults", type=float, default=0)
    args = parser.parse_args()
    link = Link(args.mb_per_s * 1e6, args.faults)
    asyncio.run(serve(Server(args.folder, link, args.latency_ms / 1e3)))


if __name__ == "__main__":
    main()
