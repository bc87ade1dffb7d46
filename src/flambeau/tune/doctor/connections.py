"""Whom a script's processes talk to over TCP or a socket file: the sandbox cannot undo what they do there.

Source: `Documentation/networking/proc_net_tcp.rst`, `include/uapi/linux/unix_diag.h` of Linux.
"""

import ipaddress
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")
_ESTABLISHED = "01"
_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _UNIX_NAME, _UNIX_PEER = 4, 20, 0, 2
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
    """Peers outside of these processes: ADDRESS:PORT and its usual service, or a file."""
    sockets = {inode for process in processes for inode in _sockets_of(process)}
    if not sockets:
        return set()
    rows = [row for name in ("tcp", "tcp6") for row in _rows(_PROC / "net" / name)]
    # A connection between two of the processes has both ends in `inside`.
    inside = {local for local, _, inode in rows if inode in sockets}
    outside = {
        _named(remote) for _, remote, inode in rows if inode in sockets and remote not in inside
    }
    return outside | _socket_files({int(inode) for inode in sockets})


def _sockets_of(process: int) -> Iterator[str]:
    with suppress(OSError):
        for entry in (_PROC / f"{process}" / "fd").iterdir():
            with suppress(OSError):
                target = str(entry.readlink())
                if target.startswith("socket:["):
                    yield target[8:-1]


def _socket_files(inodes: set[int]) -> set[str]:
    """Files of the sockets of others that some sockets are connected to: Docker, PostgreSQL, tmux, ..."""
    names: dict[int, bytes] = {}
    peers: dict[int, int] = {}
    with suppress(OSError):
        for inode, kind, value in _unix_attributes():
            if kind == _UNIX_NAME:
                names[inode] = value
            elif kind == _UNIX_PEER and inode in inodes:
                peers[inode] = struct.unpack("=I", value)[0]
    found = {names.get(peer, b"").rstrip(b"\0") for peer in peers.values() if peer not in inodes}
    return {os.fsdecode(name) for name in found if name.startswith(b"/")}


def _unix_attributes() -> Iterator[tuple[int, int, bytes]]:
    """Inode, number and value of each attribute of all sockets of this machine's file systems."""
    request = struct.pack("=BBHIIIII", socket.AF_UNIX, 0, 0, 0xFFFFFFFF, 0, 1 | 4, 0, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as netlink:
        netlink.settimeout(1.0)
        netlink.send(struct.pack("=IHHII", 16 + len(request), 20, 0x301, 1, 0) + request)
        while True:
            data = netlink.recv(1 << 17)
            at = 0
            while at < len(data):
                length, kind = struct.unpack_from("=IH", data, at)
                if kind != _SOCK_DIAG_BY_FAMILY:  # the end, or an error
                    return
                (inode,) = struct.unpack_from("=I", data, at + 20)
                place = at + 32
                while place < at + length:
                    size, number = struct.unpack_from("=HH", data, place)
                    yield inode, number, data[place + 4 : place + size]
                    place += size + 3 & ~3
                at += length + 3 & ~3


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
