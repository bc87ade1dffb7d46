"""Requests to a store through fsspec: ranges, facts and lists of objects; retried with a bound.

fsspec and its back ends (aiohttp, s3fs, gcsfs, adlfs, huggingface_hub) speak to the store and find its
credentials. Here is what they leave open: which faults are tried again and for how long, messages for the
user, and one file system for each process, since the thread of fsspec's event loop does not survive a fork.
"""

import asyncio
import contextlib
import datetime
import functools
import importlib
import logging
import os
import random
import re
import shutil
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

from flambeau.data.stores.address import without_secrets
from flambeau.errors import InputError
from flambeau.optional_packages import extra
from flambeau.terminal import say

T = TypeVar("T")

_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs", "http": "aiohttp", "https": "aiohttp"}
_CONNECT_S = 15.0
_SILENCE_S = 30.0  # without a byte; a slow answer that goes on is none
_LONGEST_S = 600.0  # of one request, if all else fails
_PIECE = 32 << 20  # bytes of a request in a download
_MOST_SMALL = 1 << 30  # bytes of an object that is read whole into memory
_AGAIN = frozenset({408, 409, 425, 429, 499})  # and 5xx
_DENIED = frozenset({401, 403, 407})
_UNTRUSTED = 495  # as nginx calls it: no status of HTTP
_CODES = {"SlowDown": 503, "RequestTimeout": 408, "InternalError": 500, "PreconditionFailed": 412}


@dataclass(frozen=True)
class Retries:
    """How long a request is tried again.

    Attributes:
        first_s, most_s: first and longest wait between tries; each is drawn from half of its length on, so
            that many processes do not come back at once.
        total_s: no try begins later after the first; below the 60 s after which a data worker counts as lost.
    """

    first_s: float = 0.25
    most_s: float = 10.0
    total_s: float = 50.0


DEFAULT_RETRIES = Retries()


class ObjectFacts(NamedTuple):
    """What a store says of an object.

    Attributes:
        version: changes with the content: the ETag, or what the store has instead; '' if it has nothing.
    """

    size: int
    version: str


class Listed(NamedTuple):
    """What a list says of one thing in a folder.

    Attributes:
        address: with a slash at its end if it is a folder.
        size: bytes; 0 for folders, and where the store does not say.
        changed: seconds since 1970; None where the store does not say.
    """

    address: str
    size: int
    changed: float | None

    @property
    def is_folder(self) -> bool:
        return self.address.endswith("/")


class StoreFault(InputError):
    """A store that does not answer as it should; the message names the object."""


class Missing(StoreFault):
    """There is no such object."""


class Denied(StoreFault):
    """Whoever asks may not read the object."""


class Store:
    """The stores of one process, by scheme. Safe in threads.

    Args:
        tell: called with a message, once per object that is asked for again.
    """

    def __init__(
        self, *, retries: Retries | None = None, tell: Callable[[str], object] = say
    ) -> None:
        self._retries = DEFAULT_RETRIES if retries is None else retries
        self._tell = tell
        self._lock = threading.Lock()
        self._systems: dict[str, Any] = {}
        self._told: set[str] = set()
        # Not the global generator, which belongs to the training.
        self._random = random.Random()

    def deadline(self) -> float:
        """`time.monotonic()` after which what begins now is not tried again."""
        return time.monotonic() + self._retries.total_s

    def facts(self, address: str) -> ObjectFacts:
        """Size and version of an object; Missing if there is none."""
        info = self._tried(address, lambda fs: fs.info(_inside(address)), "_info")
        size = info.get("size")
        if info.get("type") == "directory" or size is None:
            raise Missing(
                f"{address} is no object whose size the store tells\nGive the address of a file"
            )
        hashes = ("ETag", "etag", "md5Hash", "content_md5", "Content-MD5", "blob_id")
        names = (*hashes, "Last-Modified", "mtime")
        version = next((str(info[name]) for name in names if info.get(name)), "")
        return ObjectFacts(int(size), version.strip('"'))

    def read(self, address: str, start: int, stop: int, *, until: float | None = None) -> bytes:
        """The bytes start .. stop of an object.

        Args:
            until: `time.monotonic()` after which nothing is tried again; by default counted from now.
        """
        if start == stop:
            return b""

        def call(fs: Any) -> bytes:
            data: bytes = fs.cat_file(_inside(address), start=start, end=stop)
            if len(data) > stop - start:
                raise StoreFault(
                    f"{address}: the store sends more than the part of the object that is asked for\n"
                    "It must answer requests for ranges of bytes; copy the data to another one"
                )
            if len(data) < stop - start:
                if fs.info(_inside(address)).get("size", stop) < stop:
                    raise StoreFault(changed(address))
                raise _Cut(f"{len(data)} of {stop - start} bytes arrived")
            return data

        return self._tried(address, call, "_cat_file", until=until)

    def read_whole(self, address: str) -> bytes:
        """A small object; Missing if there is none."""
        size = self.facts(address).size
        if size > _MOST_SMALL:
            raise StoreFault(f"{address} has {size} bytes, more than is read at once")
        return self.read(address, 0, size)

    def download(self, address: str, facts: ObjectFacts, file: IO[bytes]) -> None:
        """Write a whole object of these facts into a file; StoreFault if it changes meanwhile."""
        for start in range(0, facts.size, _PIECE):
            file.write(self.read(address, start, min(start + _PIECE, facts.size)))
        if self.facts(address) != facts:
            raise StoreFault(changed(address))

    def listed(self, folder: str) -> list[str]:
        """The addresses of what lies in a folder, by name; those of folders end in a slash."""
        return [one.address for one in self.listed_facts(folder)]

    def listed_facts(self, folder: str) -> list[Listed]:
        """What lies in a folder, by name."""
        entries = self._tried(folder, lambda fs: fs.ls(_inside(folder), detail=True), "_ls")
        scheme = folder.partition("://")[0]
        found = []
        for entry in entries:
            name = str(entry["name"]).rstrip("/")
            if name == _inside(folder).rstrip("/"):
                continue
            address = name if "://" in name else f"{scheme}://{name}"
            is_folder = entry.get("type") == "directory"
            size = 0 if is_folder else int(entry.get("size") or 0)
            found.append(Listed(address + "/" * is_folder, size, _changed_at(entry)))
        return sorted(found, key=lambda one: one.address)

    def put(self, path: Path, address: str) -> None:
        """Write a file as an object, whole or not at all."""
        if address.startswith("file://"):
            goal = Path(_inside(address))
            goal.parent.mkdir(parents=True, exist_ok=True)
            part = goal.with_name(f".{goal.name}.part")
            shutil.copyfile(path, part)
            with part.open("rb+") as file:
                os.fsync(file.fileno())  # else a power cut could leave the name without its bytes
            part.replace(goal)
            return
        try:
            self._tried(address, lambda fs: fs.put_file(str(path), _inside(address)), "_put_file")
        except Missing as error:
            raise StoreFault(
                f"{address} cannot be written: there is no such bucket\nMake it first, or name another one"
            ) from error

    def copy(self, address: str, goal: str) -> None:
        """Copy an object to another address of the same store, whole or not at all."""
        if address.startswith("file://"):
            self.put(Path(_inside(address)), goal)
            return
        self._tried(address, lambda fs: fs.cp_file(_inside(address), _inside(goal)), "_cp_file")

    def remove(self, address: str) -> None:
        """Remove an object, if it is there."""
        with contextlib.suppress(Missing):
            self._tried(address, lambda fs: fs.rm_file(_inside(address)), "_rm_file")

    def _system(self, address: str) -> Any:
        scheme = address.partition("://")[0]
        with self._lock:
            if scheme not in self._systems:
                self._systems[scheme] = _file_system(scheme)
            return self._systems[scheme]

    def _tried(
        self,
        address: str,
        call: Callable[[Any], T],
        method: str,
        *,
        until: float | None = None,
    ) -> T:
        end = self.deadline() if until is None else until
        wait_s = self._retries.first_s
        while True:
            try:
                return call(_Bounded(self._system(address), method))
            except InputError:
                raise
            except Exception as error:
                fault = _fault_of(error)
                if not fault.may_pass:
                    raise _error_of(address, fault) from error
                pause_s = max(wait_s * self._random.uniform(0.5, 1.0), fault.wait_s)
                if time.monotonic() + pause_s > end:
                    raise StoreFault(
                        f"{address}: {fault.text}, however often it is asked again\n"
                        "See that the store answers, and run the command again: nothing is lost"
                    ) from error
                self._tell_once(address, fault)
            time.sleep(pause_s)
            wait_s = min(2 * wait_s, self._retries.most_s)

    def _tell_once(self, address: str, fault: "_Fault") -> None:
        with self._lock:
            is_new = address not in self._told
            self._told.add(address)
        if is_new:
            self._tell(
                f"{address}: {fault.text}; it is asked for again, for up to "
                f"{self._retries.total_s:g} s each time"
            )


def changed(address: str) -> str:
    """The message about an object that is another one than before."""
    return (
        f"{address} has changed since it was first read\n"
        "Put the object back that was there, or train on the new one: --fresh, or another --out"
    )


class _Cut(OSError):
    """Fewer bytes than were asked for."""


class _Fault(NamedTuple):
    """What an exception of a back end is about.

    Attributes:
        status: of HTTP; None if nothing was answered.
        wait_s: as the store asks for.
    """

    text: str
    status: int | None
    may_pass: bool
    wait_s: float = 0.0


class _Bounded:
    """A file system whose calls end after `_LONGEST_S`, where it is an asynchronous one."""

    def __init__(self, system: Any, method: str) -> None:
        self._system, self._method = system, method

    def __getattr__(self, name: str) -> Any:
        system = self._system
        if not getattr(system, "async_impl", False) or f"_{name}" != self._method:
            return getattr(system, name)
        sync = importlib.import_module("fsspec.asyn").sync
        call = getattr(system, self._method)
        return functools.partial(sync, system.loop, call, timeout=_LONGEST_S)


class _EachOnce(logging.Filter):
    """Lets each message pass once: gcsfs repeats some of them at every request."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        is_new = text not in self._seen
        if len(self._seen) == _MOST_SEEN:  # texts with names of objects are many
            self._seen.clear()
        self._seen.add(text)
        return is_new


_MOST_SEEN = 1000
_EACH_ONCE = _EachOnce()


def _file_system(scheme: str) -> Any:
    what = f"{scheme}://"
    fsspec = extra("fsspec", what=what)
    if scheme in _PACKAGES:
        extra(_PACKAGES[scheme], what=what)
    options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
    if scheme in ("http", "https"):
        aiohttp = extra("aiohttp", what=what)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_SILENCE_S)
        # The environment: ~/.netrc, and proxies.
        options["headers"] = {
            "Accept-Encoding": "identity"
        }  # a part of what was compressed is none
        options["client_kwargs"] = {"timeout": timeout, "trust_env": True}
    if scheme == "gs":
        logging.getLogger("gcsfs").addFilter(_EACH_ONCE)
    if scheme == "hf":  # says of each of its own retries that there is one
        logging.getLogger("huggingface_hub.utils._http").setLevel(logging.ERROR)
    if scheme == "s3":
        retries = {"total_max_attempts": 1}  # tried again here
        options["config_kwargs"] = {
            "connect_timeout": _CONNECT_S,
            "read_timeout": _SILENCE_S,
            "retries": retries,
        }
    system = fsspec.filesystem(scheme, **options)
    if scheme == "s3":
        system.retries = 1
    return system


def _inside(address: str) -> str:
    """What a file system calls an object."""
    scheme, _, rest = address.partition("://")
    if scheme in ("http", "https"):
        return address
    return rest


def _changed_at(entry: Mapping[str, Any]) -> float | None:
    """When an object was changed, as local files, s3fs, gcsfs and adlfs call it in their lists."""
    names = ("mtime", "LastModified", "updated", "last_modified")
    for value in (entry[name] for name in names if entry.get(name)):
        if isinstance(value, int | float):
            return float(value)
        with contextlib.suppress(ValueError, OverflowError):
            time = datetime.datetime.fromisoformat(value) if isinstance(value, str) else value
            return float(time.timestamp())
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__  # type: ignore[assignment]


def _fault_of(error: BaseException) -> _Fault:
    """What an exception of fsspec or of a back end says, by the status of HTTP where there is one."""
    for one in _chain(error):
        status, headers = _status_of(one)
        if status is not None:
            return _Fault(
                _status_text(status),
                status,
                may_pass=status in _AGAIN or status >= 500,
                wait_s=_retry_after(headers),
            )
    for one in _chain(error):
        name = type(one).__name__
        if isinstance(one, ssl.SSLCertVerificationError):
            said = (
                getattr(cause, "verify_message", "") for cause in _chain(one)
            )  # aiohttp's has none
            why = next(filter(None, said), "it cannot be verified")
            return _Fault(f"its certificate is not trusted ({why})", _UNTRUSTED, may_pass=False)
        if "Credentials" in name or "Token" in name or isinstance(one, PermissionError):
            return _Fault("access is denied", 403, may_pass=False)
        is_missing = isinstance(one, FileNotFoundError | NotADirectoryError | IsADirectoryError)
        if is_missing and not _is_of_connection(error):  # http:// says so of a lost connection, too
            return _Fault("it is not there", 404, may_pass=False)
    is_late = any(
        isinstance(one, TimeoutError | asyncio.TimeoutError) or "Timeout" in type(one).__name__
        for one in _chain(error)
    )
    if is_late:
        return _Fault("the store does not answer in time", None, may_pass=True)
    text = " ".join(without_secrets(str(error)).split())[:200] or type(error).__name__
    may_pass = isinstance(error, OSError) or _is_of_connection(error)
    what = text if isinstance(error, _Cut) else f"the connection failed ({text})"
    return _Fault(what if may_pass else text, None, may_pass=may_pass)


def _is_of_connection(error: BaseException) -> bool:
    """Whether the back end lost its connection: aiohttp and botocore have classes of their own for that."""
    for one in _chain(error):
        if isinstance(one, ConnectionError | TimeoutError):
            return True
        if type(one).__module__.partition(".")[0] in (
            "aiohttp",
            "botocore",
            "aiobotocore",
            "httpx",
        ):
            status, _ = _status_of(one)
            name = type(one).__name__
            if status is None and "Credentials" not in name and "ParamValidation" not in name:
                return True
    return False


def _status_of(error: BaseException) -> tuple[int | None, Mapping[str, str]]:
    """Status and headers of an answer, as aiohttp, botocore and httpx keep them in their exceptions."""
    response: Any = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        facts = response.get("ResponseMetadata", {})
        code = str(response.get("Error", {}).get("Code", ""))
        status = facts.get("HTTPStatusCode") or _CODES.get(code)
        status = status or (int(code) if code.isdecimal() else None)
        return status, facts.get("HTTPHeaders", {})
    source: Any = error if response is None else response
    status = getattr(source, "status", None) or getattr(source, "status_code", None)
    headers = getattr(source, "headers", None)
    return (status if isinstance(status, int) else None), headers or {}


def _retry_after(headers: Mapping[str, str]) -> float:
    """Seconds that a store asks to wait; 0 if it does not say, or gives a date."""
    text = next((headers[name] for name in headers if name.lower() == "retry-after"), "")
    return float(text) if re.fullmatch(r"\d{1,5}", str(text).strip()) else 0.0


def _status_text(status: int) -> str:
    words = {
        404: "it is not there",
        412: "it has changed",
        416: "it is shorter than it was",
        429: "the store asks to slow down (429)",
        503: "the store asks to slow down (503)",
    }
    if status in _DENIED:
        return f"access is denied ({status})"
    return words.get(status, f"the store answers with status {status}")


def _error_of(address: str, fault: _Fault) -> StoreFault:
    if fault.status == 404:
        return Missing(
            f"{address} is not there\nSee that its name is right, and that it was uploaded"
        )
    if fault.status in _DENIED:
        return Denied(
            f"{address}: {fault.text}\nGive credentials that may read it where the store's own programs "
            "look: the environment, ~/.aws/credentials, ~/.netrc"
        )
    if fault.status in (412, 416):
        return StoreFault(changed(address))
    if fault.status == _UNTRUSTED:
        return StoreFault(
            f"{address}: {fault.text}\nIf you trust it, name the file of its certificate authority in "
            "SSL_CERT_FILE (https://) or AWS_CA_BUNDLE (s3://)"
        )
    return StoreFault(f"{address}: {fault.text}\nSee that the address is right")


_processes: dict[int, Store] = {}


def store() -> Store:
    """The stores of this process; a fork gets new ones, since it has no thread of the old ones."""
    pid = os.getpid()
    found = _processes.get(pid)
    if found is None:
        # The old ones stay: who drops them closes connections that the parent still uses, and waits for it.
        found = _processes.setdefault(pid, Store())
    return found
