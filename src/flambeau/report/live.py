"""A server for a report that is made anew for each request, reachable only from this machine."""

import http.server
from collections.abc import Callable
from typing import Any

NAMES = ("localhost", "127.0.0.1")


def server(page: Callable[[], str], *, port: int) -> http.server.ThreadingHTTPServer:
    """A server of one page at http://localhost:PORT/.

    It listens on 127.0.0.1 and answers only requests for localhost, against DNS rebinding.

    Args:
        page: makes the page.
        port: 0 for any free one.

    Raises:
        OSError: the port is taken.
    """

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            host = self.headers.get("Host", "").rpartition(":")[0]
            if host not in NAMES:
                self._answer(403, "only http://localhost is answered here")
            elif self.path.partition("?")[0] != "/":
                self._answer(404, "there is one page here, /")
            else:
                self._answer(200, page(), kind="text/html")

        def _answer(self, status: int, text: str, *, kind: str = "text/plain") -> None:
            content = text.encode(errors="backslashreplace")
            self.send_response(status)
            for name, value in (
                ("Content-Type", f"{kind}; charset=utf-8"),
                ("Content-Length", str(len(content))),
                ("Cache-Control", "no-store"),
                ("X-Content-Type-Options", "nosniff"),
            ):
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            """No line for each request."""

    return http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
