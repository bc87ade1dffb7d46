"""Requests to a web server that does wrong: what is tried again, what is told, and what is an error."""

import logging
import os
import shutil
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flambeau.data.stores.store import Missing, Retries, Store, StoreFault, _EachOnce, store
from object_server import Fault, ObjectServer, Request, serving

CONTENT = bytes(range(256)) * 400
SHORT = Retries(first_s=0.01, most_s=0.05, total_s=2.0)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ObjectServer]:
    (tmp_path / "a.bin").write_bytes(CONTENT)
    with serving(tmp_path) as serves:
        yield serves


class Asked:
    """A store that notes what it tells."""

    def __init__(self, server: ObjectServer, retries: Retries = SHORT) -> None:
        self.told: list[str] = []
        self.store = Store(retries=retries, tell=self.told.append)
        self.address = f"{server.url}/a.bin"

    def read(self, start: int = 100, stop: int = 5000) -> bytes:
        return self.store.read(self.address, start, stop)


def at_first(fault: Fault, count: int = 1) -> "Iterator[Fault | None]":
    return lambda request: fault if request.method == "GET" and request.number <= count else None  # type: ignore[return-value]


def test_the_version_of_an_object_of_hugging_face(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its Git: HfFileSystem has no ETag."""

    class Hub:
        def info(self, path: str) -> dict[str, object]:
            return {"name": path, "size": 7, "type": "file", "blob_id": "2f1e", "lfs": None}

    asked = Store(retries=SHORT)
    monkeypatch.setattr(asked, "_system", lambda address: Hub())
    assert asked.facts("hf://datasets/me/a/x.parquet") == (7, "2f1e")


def test_an_object_that_became_shorter(server: ObjectServer) -> None:
    asked = Asked(server)
    (server.folder / "a.bin").write_bytes(CONTENT[:4000])
    with pytest.raises(StoreFault, match=r"a\.bin has changed since it was first read"):
        asked.read()
    assert asked.told == []


def test_ranges_and_facts(server: ObjectServer) -> None:
    asked = Asked(server)
    assert asked.read() == CONTENT[100:5000]
    assert asked.read(7, 7) == b""
    facts = asked.store.facts(asked.address)
    assert facts.size == len(CONTENT)
    assert facts.version
    assert asked.store.facts(asked.address) == facts
    (server.folder / "a.bin").write_bytes(CONTENT[:-1] + b"x")
    assert asked.store.facts(asked.address) != facts
    assert asked.told == []


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Fault(status=500), "status 500"),
        (Fault(status=502), "status 502"),
        (Fault(status=503), "slow down (503)"),
        (Fault(status=429), "slow down (429)"),
        (Fault(status=408), "status 408"),
        (Fault(cut=1000), "connection failed"),
        (Fault(cut=0), "connection failed"),
        (Fault(short=10), "4890 of 4900 bytes arrived"),
    ],
)
def test_what_may_pass_is_tried_again_and_told_once(
    server: ObjectServer, fault: Fault, words: str
) -> None:
    asked = Asked(server)
    server.fault = at_first(fault, 2)  # type: ignore[assignment]
    assert asked.read() == CONTENT[100:5000]
    assert server.num("GET", "a.bin") == 3
    (line,) = asked.told
    assert line.startswith(f"{asked.address}: ")
    assert words in line
    server.fault = lambda request: fault if request.number == 4 else None
    assert asked.read(0, 9) == CONTENT[:9]
    assert len(asked.told) == 1


def test_it_waits_as_long_as_the_store_asks(server: ObjectServer) -> None:
    asked = Asked(server)
    waited = []

    def fault(request: Request) -> Fault | None:
        waited.append(time.monotonic())
        return Fault(status=503, headers={"Retry-After": "1"}) if request.number == 1 else None

    server.fault = fault
    assert asked.read() == CONTENT[100:5000]
    assert waited[1] - waited[0] >= 1


def test_it_gives_up_where_the_store_asks_to_wait_for_longer_than_the_bound(
    server: ObjectServer,
) -> None:
    asked = Asked(server)
    server.fault = lambda request: Fault(status=503, headers={"Retry-After": "3600"})
    with pytest.raises(StoreFault, match=r"slow down \(503\), however often"):
        asked.read()
    assert server.num("GET", "a.bin") == 1


@pytest.mark.parametrize("fault", [Fault(status=503), Fault(cut=5), Fault(short=1)])
def test_there_is_a_bound(server: ObjectServer, fault: Fault) -> None:
    asked = Asked(server, Retries(first_s=0.01, most_s=0.02, total_s=1.0))
    server.fault = lambda request: fault
    with pytest.raises(StoreFault) as caught:
        asked.read()
    first, second = str(caught.value).splitlines()
    assert first.startswith(f"{asked.address}: ")
    assert second.startswith("See that the store answers")
    assert server.num("GET", "a.bin") > 2


def test_a_store_that_is_silent_is_given_up(
    server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flambeau.data.stores.store._SILENCE_S", 0.2)
    asked = Asked(server)
    server.fault = at_first(Fault(wait_s=1.5))  # type: ignore[assignment]
    assert asked.read() == CONTENT[100:5000]
    (line,) = asked.told
    assert "does not answer in time" in line


def test_a_store_that_is_not_there(tmp_path: Path) -> None:
    with serving(tmp_path) as serves:
        address = f"{serves.url}/a.bin"
    asked = Store(retries=Retries(0.01, 0.02, 0.1), tell=lambda _: None)
    with pytest.raises(StoreFault, match=r"the connection failed"):
        asked.read(address, 0, 10)
    with pytest.raises(StoreFault, match=r"the connection failed|is not there"):
        asked.facts(address)


@pytest.mark.parametrize("status", [401, 403])
def test_who_may_not_read_is_told_at_once(server: ObjectServer, status: int) -> None:
    asked = Asked(server)
    server.fault = lambda request: Fault(status=status)
    for ask in (asked.read, lambda: asked.store.facts(asked.address)):
        server.requests.clear()
        with pytest.raises(StoreFault, match=rf"access is denied \({status}\)\nGive credentials"):
            ask()
        assert len({one.method for one in server.requests}) == len(server.requests)
    assert asked.told == []


def test_what_is_missing_is_told_at_once(server: ObjectServer) -> None:
    asked = Asked(server)
    gone = asked.address.replace("a.bin", "b.bin")
    for ask in (lambda: asked.store.read(gone, 0, 9), lambda: asked.store.facts(gone)):
        with pytest.raises(Missing, match=r"b\.bin is not there"):
            ask()
    assert asked.told == []


def test_facts_are_asked_again_too(server: ObjectServer) -> None:
    asked = Asked(server)
    server.fault = lambda request: Fault(status=503) if request.number < 3 else None
    assert asked.store.facts(asked.address).size == len(CONTENT)


def test_a_server_without_ranges_is_refused(server: ObjectServer) -> None:
    asked = Asked(server)
    server.fault = lambda request: Fault(whole=True)
    with pytest.raises(StoreFault, match=r"more than the part .*\nIt must answer .* ranges"):
        asked.read()


def test_a_download_of_an_object_that_changes_is_refused(
    server: ObjectServer, tmp_path: Path
) -> None:
    asked = Asked(server)
    facts = asked.store.facts(asked.address)

    def change(request: Request) -> None:
        if request.method == "GET":
            (server.folder / "a.bin").write_bytes(CONTENT[:-1] + b"x")

    server.fault = change  # type: ignore[assignment]
    with (
        (tmp_path / "copy").open("wb") as file,
        pytest.raises(StoreFault, match=r"a\.bin has changed since it was first read"),
    ):
        asked.store.download(asked.address, facts, file)


def test_a_list_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("b.tar", "a.tar"):
        (tmp_path / name).write_bytes(b"x")
    asked = Store(retries=SHORT)
    with serving(tmp_path, lists=True) as serves:
        listed = asked.listed(f"{serves.url}/")
        assert listed == [f"{serves.url}/{name}" for name in ("a.tar", "b.tar", "sub/")]
    local = asked.listed(f"file://{tmp_path}/")
    assert local == [f"file://{tmp_path}/{name}" for name in ("a.tar", "b.tar", "sub/")]


def test_local_files_have_addresses_too(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(CONTENT)
    asked = Store(retries=SHORT)
    address = f"file://{tmp_path}/a.bin"
    assert asked.facts(address).size == len(CONTENT)
    assert asked.read(address, 5, 50) == CONTENT[5:50]
    with pytest.raises(Missing):
        asked.read(f"file://{tmp_path}/b.bin", 0, 5)


def test_a_fork_reads_through_a_loop_of_its_own(server: ObjectServer) -> None:
    address = f"{server.url}/a.bin"
    assert store().read(address, 0, 10) == CONTENT[:10]
    before = store()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = int(store() is before or store().read(address, 10, 20) != CONTENT[10:20])
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert store() is before


def test_threads_share_a_store(server: ObjectServer) -> None:
    asked = Asked(server)
    server.fault = lambda request: Fault(status=503) if request.number % 3 == 1 else None
    found: dict[int, bytes] = {}

    def read(number: int) -> None:
        found[number] = asked.read(number, number + 100)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: CONTENT[number : number + 100] for number in range(12)}
    assert len(asked.told) == 1


@pytest.mark.skipif(shutil.which("openssl") is None, reason="it makes the certificate")
def test_a_certificate_that_is_not_trusted(tmp_path: Path) -> None:
    """Said at once and as what it is, where asking again cannot help; trusted where the user names it."""
    words = (
        "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=a -addext subjectAltName=IP:127.0.0.1"
    )
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    files = ["-keyout", f"{key}", "-out", f"{certificate}"]
    subprocess.run(["openssl", *words.split(), *files], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.bin").write_bytes(CONTENT)
    with serving(tmp_path / "data", tls=context) as serves:
        asked = Asked(serves)
        with pytest.raises(StoreFault) as caught:
            asked.read()
        assert "its certificate is not trusted (self" in str(caught.value)
        assert "SSL_CERT_FILE" in str(caught.value) and asked.told == []
        # aiohttp reads the variable when it is imported.
        program = (
            "import sys; from flambeau.data.stores.store import Store; "
            "sys.stdout.buffer.write(Store().read(sys.argv[1], 100, 5000))"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, asked.address],
            env={**os.environ, "SSL_CERT_FILE": f"{certificate}"},
            capture_output=True,
            check=True,
        )
    assert done.stdout == CONTENT[100:5000]


def test_a_message_of_a_back_end_is_shown_once() -> None:
    """As gcsfs has it for each request to a bucket whose kind it may not ask for."""
    once = _EachOnce()
    records = [
        logging.LogRecord("gcsfs", logging.WARNING, "core.py", 1, "no kind of %s", (bucket,), None)
        for bucket in ("a", "a", "b", "a")
    ]
    assert [once.filter(record) for record in records] == [True, False, True, False]
