"""The address and interface by which this machine reaches others; gloo only looks up the host name."""

import contextlib
import socket
import struct
from typing import Any

_SIOCGIFADDR = 0x8915  # linux/sockios.h: the address of an interface


def route(family: int, address: Any) -> str:
    """This machine's address for packets to another one; nothing is sent."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """The name of the interface with this IPv4 address; None if unknown."""
    try:
        import fcntl
    except ImportError:
        return None
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None
