"""Comments that silence a rule: `# noqa`, `# noqa: FLB101` and `# flambeau: ignore[FLB101]`."""

import io
import re
import tokenize
from collections.abc import Iterator, Sequence
from typing import Optional

from flambeau_lint.rule import Finding
from flambeau_lint.source import Source

_NOQA = re.compile(
    r"#\s*noqa(?P<codes>:\s*[A-Z]+[0-9]+(?:[,\s]+[A-Z]+[0-9]+)*)?(?![\w:])", re.IGNORECASE
)
_OURS = re.compile(r"#\s*flambeau:\s*ignore\[(?P<codes>[^\]]*)\]")
_FILE = re.compile(
    r"#\s*flambeau:\s*ignore-file\b|#\s*(?:ruff|flake8)\s*:\s*noqa\s*$", re.IGNORECASE
)
_CODE = re.compile(r"[A-Z]+[0-9]+")

ALL = "ALL"


def silenced_lines(data: bytes) -> tuple[dict[int, set[str]], bool]:
    """Codes that comments silence, by line; and whether the whole file is."""
    lowered = data.lower()
    if b"noqa" not in lowered and b"flambeau" not in lowered:
        return {}, False
    found: dict[int, set[str]] = {}
    for line, comment in _comments(data):
        if _FILE.search(comment):
            return {}, True
        codes: set[str] = set()
        for pattern in (_NOQA, _OURS):
            match = pattern.search(comment)
            if match is None:
                continue
            named = _CODE.findall((match["codes"] or "").upper())
            codes |= (
                set(named)
                if named
                else ({ALL} if pattern is _NOQA and not match["codes"] else set())
            )
        if codes:
            found[line] = codes
    for line, end in _string_ends(data).items() if found else ():
        if end in found:
            found[line] = found.get(line, set()) | found[end]
    return found, False


def unknown_codes(data: bytes, known: Sequence[str]) -> Iterator[tuple[int, str]]:
    """(line, code) of our codes in comments that no rule has."""
    for line, codes in silenced_lines(data)[0].items():
        for code in sorted(codes):
            if code.startswith("FLB") and not any(one.startswith(code) for one in known):
                yield line, code


def _tokens(data: bytes) -> Iterator[tokenize.TokenInfo]:
    """Of a text: the encoding that a comment of the file may name is no longer its own."""
    return tokenize.generate_tokens(io.StringIO(data.decode("utf-8")).readline)


def _comments(data: bytes) -> Iterator[tuple[int, str]]:
    try:
        for token in _tokens(data):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string
    except (tokenize.TokenError, SyntaxError, IndentationError):
        return


def without_silenced(data: bytes, findings: Sequence[Finding]) -> list[Finding]:
    """The findings that no comment on their lines silences: the first line, or the last of the statement."""
    lines, is_off = silenced_lines(data)
    if is_off:
        return []
    if not lines:
        return list(findings)
    source = Source(data)
    return [one for one in findings if not _is_silenced(one, source, lines)]


def _is_silenced(one: Finding, source: Source, lines: dict[int, set[str]]) -> bool:
    first = source.place_of(one.start)[0]
    last = source.place_of(max(one.start, one.end - 1))[0]
    for line in {first, last}:
        codes = lines.get(line, set())
        if ALL in codes or any(one.code == code for code in codes):
            return True
    return False


def add_noqa(data: bytes, findings: Sequence[Finding]) -> bytes:
    """The source with `# noqa: CODES` behind each line that something is found in."""
    source = Source(data)
    wanted: dict[int, set[str]] = {}
    ends = _string_ends(data)
    for one in findings:
        line = source.place_of(max(one.start, one.end - 1))[0]
        while line in ends:
            line = ends[line]
        wanted.setdefault(line, set()).add(one.code)
    comments = dict(_comments(data))
    out = []
    starts = [*source.starts, len(data)]
    for number in range(1, len(starts)):
        whole = data[starts[number - 1] : starts[number]]
        body = whole.rstrip(b"\r\n")
        end = whole[len(body) :]
        codes = wanted.get(number)
        if codes and not body.endswith(b"\\"):
            body = _noted(body, codes, comments.get(number))
        out.append(body + end)
    return b"".join(out)


def _noted(body: bytes, codes: set[str], comment: Optional[str]) -> bytes:
    match = _NOQA.search(comment) if comment else None
    if comment is None or match is None or not match["codes"]:
        return body.rstrip() + f"  # noqa: {', '.join(sorted(codes))}".encode()
    old = comment[match.start() : match.end()].encode()
    every = sorted({*_CODE.findall(match["codes"].upper()), *codes})
    return body.replace(old, f"# noqa: {', '.join(every)}".encode())


def _string_ends(data: bytes) -> dict[int, int]:
    """For lines that end within a string, where a comment would be text: the line in which it ends."""
    ends: dict[int, int] = {}
    starts: list[int] = []
    try:
        for token in _tokens(data):
            name = tokenize.tok_name[token.type]
            first = token.start[0]
            if name.endswith("STRING_START"):
                starts.append(first)
            elif name == "STRING" or (name.endswith("STRING_END") and starts):
                first = first if name == "STRING" else starts.pop()
                ends.update(dict.fromkeys(range(first, token.end[0]), token.end[0]))
    except (tokenize.TokenError, SyntaxError, IndentationError):
        pass
    return ends
