"""What the hub of Hugging Face answers about a data set, on loopback: facts, lists and ranges of files."""

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "a" * 40


class Hub:
    """Serves `folder` as the data set `name`; with a `token` only to those who send it.

    Attributes:
        requests: method, path and range of each.
    """

    def __init__(self, folder: Path, name: str, token: str | None) -> None:
        self.folder, self.name, self.token = folder, name, token
        self.requests: list[tuple[str, str, str | None]] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,), daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def entry(self, path: Path) -> dict[str, Any]:
        name = str(path.relative_to(self.folder))
        if path.is_dir():
            return {"type": "directory", "path": name, "oid": "0" * 40}
        data = path.read_bytes()
        oid = hashlib.sha1(data).hexdigest()
        return {"type": "file", "path": name, "size": len(data), "oid": oid}


@contextlib.contextmanager
def hub_of(folder: Path, name: str, *, token: str | None = None) -> Iterator[Hub]:
    hub = Hub(folder, name, token)
    try:
        yield hub
    finally:
        hub.close()


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            return

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def _answer(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append((self.command, path, self.headers.get("Range")))
            api, files = f"/api/datasets/{hub.name}", f"/datasets/{hub.name}/resolve/"
            if not path.startswith((api, files)):
                self._refuse(404, "RepoNotFound")
            elif hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
                self._refuse(401, "GatedRepo")
            elif path.startswith(f"{api}/tree/"):
                self._list(hub.folder / path.partition("/tree/")[2].partition("/")[2])
            elif path.startswith(api):
                self._send(200, _json({"id": hub.name, "sha": COMMIT, "siblings": []}), {})
            else:
                self._file(hub.folder / path.removeprefix(files).partition("/")[2])

        def _list(self, folder: Path) -> None:
            if folder.is_dir():
                self._send(200, _json([hub.entry(path) for path in sorted(folder.iterdir())]), {})
            else:
                self._refuse(404, "EntryNotFound")

        def _file(self, path: Path) -> None:
            if not path.is_file():
                self._refuse(404, "EntryNotFound")
                return
            data = path.read_bytes()
            headers = {"ETag": f'"{hub.entry(path)["oid"]}"', "X-Repo-Commit": COMMIT}
            part = self.headers.get("Range")
            if part is None:
                self._send(200, data, headers)
                return
            first, last = (int(one) for one in part.removeprefix("bytes=").split("-"))
            headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
            self._send(206, data[first : last + 1], headers)

        def _refuse(self, status: int, why: str) -> None:
            self._send(status, _json({"error": why}), {"X-Error-Code": why})

        def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    return Handler


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()
