"""The page that is served: on this machine alone, made anew for each request."""

import http.client
import itertools
import threading
from collections.abc import Iterator

import pytest

from flambeau.report.live import server


@pytest.fixture
def port() -> Iterator[int]:
    numbers = itertools.count()
    with server(lambda: f"<p>{next(numbers)}é</p>", port=0) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        yield serving.server_address[1]
        serving.shutdown()
        thread.join()


def ask(port: int, path: str = "/", host: str | None = None) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    connection.request("GET", path, headers={} if host is None else {"Host": host})
    answer = connection.getresponse()
    found = answer.status, dict(answer.getheaders()), answer.read().decode()
    connection.close()
    return found


def test_each_request_gets_a_new_page(port: int) -> None:
    status, headers, text = ask(port)
    assert (status, text) == (200, "<p>0é</p>")
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert headers["Cache-Control"] == "no-store"
    assert ask(port, "/?again")[2] == "<p>1é</p>"


@pytest.mark.parametrize("host", ["evil.example:80", "localhost.evil.example:80", "", "[::1]:80"])
def test_another_name_for_this_machine_is_told_nothing(port: int, host: str) -> None:
    assert ask(port, host=host)[0] == 403
    assert ask(port, host=f"localhost:{port}")[2] == "<p>0é</p>"


def test_there_is_one_page(port: int) -> None:
    assert ask(port, "/../etc/passwd")[0] == 404


def test_a_port_that_is_taken(port: int) -> None:
    with pytest.raises(OSError, match="in use"):
        server(str, port=port)
