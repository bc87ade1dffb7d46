"""Whom a script's processes talk to over TCP: the sandbox cannot undo what they write there.

Source: `Documentation/networking/proc_net_tcp.rst` of Linux.
"""

import ipaddress
import socket
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")
_ESTABLISHED = "01"
_SERVICES = {
    443: "HTTPS",
    1433: "SQL Server",
    3306: "MySQL",
    5432: "PostgreSQL",
    5672: "RabbitMQ",
    6379: "Redis",
    9000: "an object store or ClickHouse",
    9092: "Kafka",
    27017: "MongoDB",
}


def outside_connections(processes: Iterable[int]) -> set[str]:
    """Peers outside of these processes, as ADDRESS:PORT and the service that usually has the port."""
    sockets = {inode for process in processes for inode in _sockets_of(process)}
    if not sockets:
        return set()
    rows = [row for name in ("tcp", "tcp6") for row in _rows(_PROC / "net" / name)]
    # A connection between two of the processes has both ends in `inside`.
    inside = {local for local, _, inode in rows if inode in sockets}
    return {
        _named(remote) for _, remote, inode in rows if inode in sockets and remote not in inside
    }


def _sockets_of(process: int) -> Iterator[str]:
    with suppress(OSError):
        for entry in (_PROC / f"{process}" / "fd").iterdir():
            with suppress(OSError):
                target = str(entry.readlink())
                if target.startswith("socket:["):
                    yield target[8:-1]


def _rows(file: Path) -> Iterator[tuple[tuple[str, int], tuple[str, int], str]]:
    """Local end, remote end and inode of each connection."""
    with suppress(OSError):
        for line in file.read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _ESTABLISHED:
                yield _end(fields[1]), _end(fields[2]), fields[9]


def _end(text: str) -> tuple[str, int]:
    """Address and port; the kernel prints an address as 4-byte numbers in the byte order of this machine."""
    address, _, port = text.partition(":")
    words = [bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8)]
    raw = b"".join(words)
    if len(raw) == 4:
        return socket.inet_ntoa(raw), int(port, 16)
    v6 = ipaddress.IPv6Address(raw)
    return str(v6.ipv4_mapped or v6), int(port, 16)


def _named(end: tuple[str, int]) -> str:
    address, port = end
    shown = f"[{address}]" if ":" in address else address
    service = f" ({_SERVICES[port]})" if port in _SERVICES else ""
    return f"{shown}:{port}{service}"
