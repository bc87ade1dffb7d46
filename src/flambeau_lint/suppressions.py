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
_BARE = re.compile(r"#\s*flambeau:\s*ignore\s*(?:$|#)")
_CODE = re.compile(r"[A-Z]+[0-9]+")

ALL = "ALL"


def silenced_lines(data: bytes) -> tuple[dict[int, set[str]], bool]:
    """Codes that comments silence, by line; and whether the whole file is."""
    found, is_off = _codes_in_comments(data)
    for line, places in _comment_places(data).items() if found else ():
        heard = [found[place] for place in places if place in found]
        if heard:
            found[line] = found.get(line, set()).union(*heard)
    return found, is_off


def _codes_in_comments(data: bytes) -> tuple[dict[int, set[str]], bool]:
    """Codes by the line of the comment that names them; and whether one silences the whole file."""
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
    return found, False


def useless_comments(data: bytes, known: Sequence[str]) -> Iterator[tuple[int, str]]:
    """(line, problem) of comments that mean to silence one of our rules and do not."""
    for line, comment in _comments(data):
        noqa = _NOQA.search(comment)
        ours = _OURS.search(comment)
        words = _CODE.findall((noqa["codes"] or "").upper()) if noqa else []
        words = [word for word in words if word.startswith("FLB")]
        words += re.split(r"[\s,]+", ours["codes"].strip()) if ours else []
        for word in words:
            if word.upper() not in known:
                yield line, f"names {word or 'no code'}, and there is no such rule"
        if ours is None and _BARE.search(comment):
            yield line, "names no code: write 'flambeau: ignore[FLB101]'"


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
    ends = _line_ends(data)
    for one in findings:
        line = source.place_of(max(one.start, one.end - 1))[0]
        wanted.setdefault(ends.get(line, line), set()).add(one.code)
    comments = dict(_comments(data))
    out = []
    starts = [*source.starts, len(data)]
    for number in range(1, len(starts)):
        whole = data[starts[number - 1] : starts[number]]
        body = whole.rstrip(b"\r\n")
        end = whole[len(body) :]
        codes = wanted.get(number)
        if codes:
            body = _noted(body, codes, comments.get(number))
        out.append(body + end)
    return b"".join(out)


def _noted(body: bytes, codes: set[str], comment: Optional[str]) -> bytes:
    match = _NOQA.search(comment) if comment else None
    if comment is None or match is None or not match["codes"]:
        return body.rstrip() + f"  # noqa: {', '.join(sorted(codes))}".encode()
    every = sorted({*_CODE.findall(match["codes"].upper()), *codes})
    noted = f"{comment[: match.start()]}# noqa: {', '.join(every)}{comment[match.end() :]}"
    return body[: len(body) - len(comment.encode())] + noted.encode()


def _comment_places(data: bytes) -> dict[int, list[int]]:
    """For some lines the other ones whose comments hold for them.

    Of a line that has no room for a comment that is where it ends; of a long import also its first line.
    """
    places = {line: [end] for line, end in _line_ends(data).items()}
    for first, last in _imports(data):
        for line in range(first + 1, last + 1):
            places.setdefault(line, []).append(first)
    return places


def _line_ends(data: bytes) -> dict[int, int]:
    """For lines that end within a string or by a backslash, where no comment fits: the last one."""
    ends = _string_ends(data)
    comments = {line for line, _ in _comments(data)}
    for number, text in enumerate(data.splitlines(), 1):
        if text.endswith(b"\\") and number not in comments:
            ends.setdefault(number, number + 1)
    for line in sorted(ends, reverse=True):
        ends[line] = ends.get(ends[line], ends[line])
    return ends


def _imports(data: bytes) -> Iterator[tuple[int, int]]:
    """The first and the last line of each import of several lines."""
    first = 0
    is_import = False
    try:
        for token in _tokens(data):
            if token.type == tokenize.NEWLINE:
                if is_import and token.start[0] > first:
                    yield first, token.start[0]
                first = 0
            elif not first and token.type == tokenize.NAME:
                first = token.start[0]
                is_import = token.string in ("from", "import")
    except (tokenize.TokenError, SyntaxError, IndentationError):
        return


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
