"""Whether an index of packages has what flambeau needs, for this machine.

After https://packaging.python.org/en/latest/specifications/simple-repository-api/, in JSON or HTML.
"""

import json
import platform
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

from flambeau.errors import InputError, why_no_json
from flambeau.version import __version__

if TYPE_CHECKING:
    from packaging.requirements import Requirement
    from packaging.version import Version

_ACCEPT = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.01"
_TIMEOUT_S = 15.0
_MOST = 64 << 20  # bytes of a list; that of torch has 2 MB
_AT_ONCE = 1 << 16


def requirements() -> "list[Requirement]":
    """What flambeau needs, without its extras."""
    from importlib import metadata

    from packaging.requirements import Requirement

    found = [Requirement(line) for line in metadata.requires("flambeau") or []]
    return [
        one for one in found if one.marker is None or one.marker.evaluate(environment={"extra": ""})
    ]


def newest_fitting(
    index: str, wanted: "Requirement", *, timeout_s: float = _TIMEOUT_S
) -> "Version | None":
    """The newest version of a package whose wheel pip would install here; None where there is none.

    Args:
        index: address, without the name of the package.
        wanted: the package and its versions.
        timeout_s: after which the index does not answer.

    Raises:
        InputError: the index does not answer, or with something else than a list of files.
    """
    from packaging.tags import sys_tags
    from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

    address = f"{index}/{canonicalize_name(wanted.name)}/"
    here = set(sys_tags())
    best = None
    for name, python in _files(address, timeout_s):
        try:
            _, version, _, tags = parse_wheel_filename(name)
        except InvalidWheelFilename:
            continue  # sources, or a name of earlier times
        is_wanted = wanted.specifier.contains(version, prereleases=False) and _takes(python)
        if tags & here and is_wanted and (best is None or version > best):
            best = version
    return best


def _takes(python: str | None) -> bool:
    """Whether a file that says which Python it requires takes this one."""
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        return platform.python_version() in SpecifierSet(python or "")
    except InvalidSpecifier:  # as pip does
        return True


def _files(address: str, timeout_s: float) -> list[tuple[str, str | None]]:
    """Names of the files of a package that are not withdrawn, and the Python that each requires."""
    try:
        kind, body = _fetch(address, timeout_s)
    except urllib.error.HTTPError as error:
        if error.code in (404, 410):
            return []
        raise InputError(f"{address} answers with {error.code} {error.reason}") from error
    except OSError as error:  # no such host, no connection, no certificate, too late
        why = getattr(error, "reason", error)
        raise InputError(
            f"{address} does not answer: {why}\nCheck the address, and whether this machine may reach it"
        ) from error
    text = body.decode("utf-8", "replace")
    if "json" not in kind:
        links = _Links()
        links.feed(text)
        return links.files
    try:
        files = json.loads(text)["files"]
        return [(f["filename"], f.get("requires-python")) for f in files if not f.get("yanked")]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = why_no_json(error) if isinstance(error, ValueError | RecursionError) else "no list"
        raise InputError(f"{address} is no list of files of a package: {why}") from error


def _fetch(address: str, timeout_s: float) -> tuple[str, bytes]:
    headers = {"Accept": _ACCEPT, "User-Agent": f"flambeau/{__version__}"}
    opener = urllib.request.build_opener(_NoPlainHttp)
    request = urllib.request.Request(address, headers=headers)
    with opener.open(request, timeout=timeout_s) as answer:
        body = b"".join(_parts(answer, address, time.monotonic() + timeout_s))
        return answer.headers.get_content_type(), body


def _parts(answer: Any, address: str, deadline: float) -> Iterator[bytes]:
    size = 0
    while part := answer.read(_AT_ONCE):
        size += len(part)
        if size > _MOST:
            raise InputError(f"{address} is longer than {_MOST >> 20} MiB, and no list of files")
        if time.monotonic() > deadline:
            raise TimeoutError("it takes too long")
        yield part


class _NoPlainHttp(urllib.request.HTTPRedirectHandler):
    """Follows no redirection from https to http."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        """As the base class, which raises HTTPError for a redirection that is refused."""
        if req.type == "https" and not newurl.startswith("https://"):
            raise InputError(f"{req.full_url} leads to {newurl}, which checks no certificate")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class _Links(HTMLParser):
    """The links of a page: their texts are names of files."""

    def __init__(self) -> None:
        super().__init__()
        self.files: list[tuple[str, str | None]] = []
        self._open: dict[str, str | None] | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Remember a link until its text comes."""
        found = dict(attrs)
        self._open = found if tag == "a" and "data-yanked" not in found else None

    def handle_endtag(self, tag: str) -> None:
        """What follows is no name."""
        self._open = None

    def handle_data(self, data: str) -> None:
        """The name of a file."""
        if self._open is not None and data.strip():
            self.files.append((data.strip(), self._open.get("data-requires-python")))
