"""A web server on loopback that answers requests for ranges of a folder's files, and does wrong when told."""

import contextlib
import hashlib
import html
import re
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Request:
    """One request: GET or HEAD, the name of the file, and the range if there is one."""

    method: str
    name: str
    range: str | None
    number: int  # of the requests with this method for this name, from 1
    headers: dict[str, str]


@dataclass(frozen=True)
class Fault:
    """What is done instead of a right answer.

    Attributes:
        status: answered instead of 200 or 206.
        cut: the connection ends after this many bytes of the body.
        short: this many bytes are missing at the end, and the header says so.
        wait_s: before the answer.
        whole: the range is ignored.
        flip: one byte of the body is another one.
    """

    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    cut: int | None = None
    short: int = 0
    wait_s: float = 0.0
    whole: bool = False
    flip: bool = False


class ObjectServer:
    """Serves a folder until it is closed; `fault` is asked before each answer."""

    def __init__(
        self, folder: Path, *, lists: bool = False, tls: ssl.SSLContext | None = None
    ) -> None:
        self.folder, self.lists = folder, lists
        self.requests: list[Request] = []
        self.sent = 0
        self.fault: Callable[[Request], Fault | None] = lambda request: None
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, str], int] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._scheme = "http" if tls is None else "https"
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,), daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def num(self, method: str, name: str) -> int:
        """How often a file was asked for."""
        return sum(one.method == method and one.name == name for one in self.requests)

    def noted(self, method: str, name: str, headers: Any) -> Request:
        with self._lock:
            number = self._counts[method, name] = self._counts.get((method, name), 0) + 1
            request = Request(method, name, headers.get("Range"), number, dict(headers.items()))
            self.requests.append(request)
            return request


@contextlib.contextmanager
def serving(
    folder: Path, *, lists: bool = False, tls: ssl.SSLContext | None = None
) -> Iterator[ObjectServer]:
    server = ObjectServer(folder, lists=lists, tls=tls)
    try:
        yield server
    finally:
        server.close()


def _handler(server: ObjectServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            return

        def do_HEAD(self) -> None:
            self._answer("HEAD")

        def do_GET(self) -> None:
            self._answer("GET")

        def _answer(self, method: str) -> None:
            name = self.path.lstrip("/")
            request = server.noted(method, name, self.headers)
            fault = server.fault(request) or Fault()
            time.sleep(fault.wait_s)
            if fault.status is not None:
                self._send(fault.status, b"", fault.headers)
                return
            path = server.folder / name
            if path.is_dir() and server.lists:
                self._list(path)
            elif not path.is_file():
                self._send(404, b"")
            else:
                self._file(path, request, fault)

        def _list(self, folder: Path) -> None:
            names = [one.name + "/" * one.is_dir() for one in sorted(folder.iterdir())]
            links = "".join(
                f'<a href="{html.escape(one)}">{html.escape(one)}</a>\n' for one in names
            )
            self._send(200, links.encode(), {"Content-Type": "text/html"})

        def _file(self, path: Path, request: Request, fault: Fault) -> None:
            data = path.read_bytes()
            etag = hashlib.sha256(data).hexdigest()[:16]
            headers = {"ETag": f'"{etag}"', "Accept-Ranges": "bytes"} | fault.headers
            status = 200
            wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", request.range or "")
            if wanted is not None and not fault.whole:
                start, stop = int(wanted[1]), int(wanted[2]) + 1
                headers["Content-Range"] = f"bytes {start}-{min(stop, len(data)) - 1}/{len(data)}"
                data = data[start:stop]
                status = 206
            if fault.flip and data:
                data = data[:-1] + bytes([data[-1] ^ 1])
            data = data[: len(data) - fault.short]
            self._send(status, data, headers, cut=fault.cut)

        def _send(
            self, status: int, data: bytes, headers: Any = None, *, cut: int | None = None
        ) -> None:
            with contextlib.suppress(ConnectionError):
                self.send_response(status)
                for key, value in (headers or {}).items():
                    self.send_header(key, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                if self.command == "HEAD":
                    return
                self.wfile.write(data[:cut])
                server.sent += len(data[:cut])
                if cut is not None:
                    self.wfile.flush()
                    linger = struct.pack("ii", 1, 0)  # a reset, no proper end
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                    self.close_connection = True
                    self.connection.close()

    return Handler
