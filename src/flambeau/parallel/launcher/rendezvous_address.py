"""The address where the nodes of a job meet, as one of them sees it.

No torch here, so that errors come at once.
"""

import contextlib
import socket
from typing import Any, NamedTuple

from flambeau.errors import InputError
from flambeau.parallel.network_interface import interface_of, route


class Rendezvous(NamedTuple):
    """The rendezvous as this machine sees it.

    Attributes:
        port: 0: any free one.
        is_here: this launcher serves it, unless another one here does.
        local_addr: by which other nodes reach this one.
    """

    host: str
    port: int
    is_here: bool
    local_addr: str
    interface: str | None = None

    @property
    def local_name(self) -> str:
        """This machine, for people."""
        return f"at {self.local_addr} (host {socket.gethostname()})"

    def refuses(self) -> str:
        """Why nobody answers there; empty if somebody does."""
        try:
            socket.create_connection((self.host, self.port), timeout=2).close()
        except OSError as error:
            return str(error)
        return ""

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


LOOPBACK = Rendezvous("127.0.0.1", 0, True, "127.0.0.1")
"""For a job of one node."""


def find_rendezvous(
    endpoint: str, *, node_rank: int | None = None, local_addr: str | None = None
) -> Rendezvous:
    """Look up a rendezvous.

    With node rank 0 it is here, whatever the host's name says, with others not. By default `local_addr` is
    the address that reaches the host.
    """
    host, _, digits = endpoint.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not digits.isdecimal() or not 0 < int(digits) < 2**16:
        raise InputError(f"a rendezvous is HOST:PORT, such as node1:29500; got {endpoint!r}")
    addresses = _look_up(host, int(digits))
    if local_addr is not None:
        _look_up(local_addr, None)
    family, _, _, _, address = addresses[0]
    is_local = any(_is_of_this_machine(family, address) for family, _, _, _, address in addresses)
    if local_addr is None:
        # Other nodes reach the host by its name too.
        local_addr = host if is_local else _route(family, address)
    is_here = is_local if node_rank is None else node_rank == 0
    return Rendezvous(host, int(digits), is_here, local_addr, _interface(local_addr))


def _look_up(host: str, port: int | None) -> list[Any]:
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise InputError(
            f"no machine named {host!r} is known here ({error}); "
            "give a name or an address by which the nodes reach each other"
        ) from error


def _is_of_this_machine(family: int, address: Any) -> bool:
    """Only a local address can be bound; torch looks up the host name instead, and can be wrong."""
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((address[0], 0, *address[2:]))
        return True
    return False


def _route(family: int, address: Any) -> str:
    try:
        return route(family, address)
    except OSError as error:
        raise InputError(f"{address[0]} cannot be reached from here: {error.strerror}") from error


def _interface(local_addr: str) -> str | None:
    with contextlib.suppress(OSError):
        address = str(socket.getaddrinfo(local_addr, None, socket.AF_INET)[0][4][0])
        if address.startswith("127.") and local_addr not in ("localhost", address):
            # Debian's /etc/hosts maps the host name to 127.0.1.1, which no other node can reach.
            address = route(
                socket.AF_INET, ("192.0.2.1", 9)
            )  # RFC 5737: an address that nobody has
        return interface_of(address)
    return None
