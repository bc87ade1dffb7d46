"""A language server: findings and fixes in an editor, while you type.

Source: Microsoft, "Language Server Protocol Specification 3.17", spoken by pygls over standard input and
output. It looks at Python files; notebooks and pages are for the command.
"""

import argparse
import asyncio
import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Optional

from lsprotocol import types
from pygls.lsp.server import LanguageServer
from pygls.workspace import TextDocument

from flambeau_lint.engine import RuleSet, apply, fix, lint
from flambeau_lint.files import is_excluded
from flambeau_lint.many_files import cache_folder, rules_of
from flambeau_lint.reports import LEVELS, rule_page
from flambeau_lint.rule import Finding, Fix
from flambeau_lint.rules.catalog import BY_CODE
from flambeau_lint.selection import FolderSettings, jobs_for
from flambeau_lint.settings import WrongUsage
from flambeau_lint.source import Source, Unreadable
from flambeau_lint.suppressions import add_noqa, without_silenced

_NAME = "flambeau-lint"
_FIX_ALL = f"{types.CodeActionKind.SourceFixAll.value}.flambeau"
_LONE_CR = re.compile(rb"\r(?!\n)")
_QUIET_S = 0.2  # without a keystroke, before a file is read again; chosen
_SEVERITIES = {
    "error": types.DiagnosticSeverity.Error,
    "warning": types.DiagnosticSeverity.Warning,
    "note": types.DiagnosticSeverity.Information,
}


def serve(arguments: argparse.Namespace, version: str) -> int:
    """Answer an editor until it says goodbye; the flags hold for all files, as on the command line."""
    # Whole texts: an edit within one counts lines as the protocol does, and pygls at form feeds, too.
    server = LanguageServer(_NAME, version, text_document_sync_kind=types.TextDocumentSyncKind.Full)
    editor = _Editor(server, arguments)
    offered = types.CodeActionOptions(code_action_kinds=[types.CodeActionKind.QuickFix, _FIX_ALL])
    # pygls marks the functions that it is given, which it cannot do with methods.
    server.feature(types.TEXT_DOCUMENT_DID_OPEN)(
        lambda params: editor.publish(params.text_document.uri)
    )
    server.feature(types.TEXT_DOCUMENT_DID_CHANGE)(
        lambda params: editor.publish_soon(params.text_document.uri)
    )
    server.feature(types.TEXT_DOCUMENT_DID_SAVE)(lambda _: editor.publish_all())
    server.feature(types.TEXT_DOCUMENT_DID_CLOSE)(
        lambda params: editor.close(params.text_document.uri)
    )
    server.feature(types.TEXT_DOCUMENT_CODE_ACTION, offered)(
        lambda params: list(editor.actions(params))
    )
    server.start_io()
    return 0


@dataclass(frozen=True)
class _Checked:
    """One version of an open file."""

    document: TextDocument
    version: Optional[int]
    source: Source
    rules: RuleSet
    findings: Sequence[Finding]

    def range_of(self, start: int, end: int) -> types.Range:
        """From one offset to another, in the units of the editor: UTF-16, if it asks for nothing else."""
        return types.Range(self._position(start), self._position(end))

    def _position(self, offset: int) -> types.Position:
        line, column = self.source.place_of(offset)
        before = self.source.line(line)[: column - 1]
        return types.Position(line - 1, self.document.position_codec.client_num_units(before))

    def edits_to(self, new: bytes) -> list[types.TextEdit]:
        """What makes the text another one, line by line, so that the cursor and marks stay where they are.

        Where a CR stands alone, one edit of all of it: some editors do not count that as the end of a line.
        They have fewer lines then, and take the end of this edit, behind their last, for that of the text.
        """
        if self._has_lone_cr:
            everything = self.range_of(0, len(self.source.data))
            return [types.TextEdit(everything, new.decode("utf-8"))]
        starts = [*self.source.starts, len(self.source.data)]
        new_lines = _lines(Source(new))
        changes = difflib.SequenceMatcher(None, _lines(self.source), new_lines).get_opcodes()
        return [
            types.TextEdit(
                self.range_of(starts[first], starts[last]),
                b"".join(new_lines[new_first:new_last]).decode("utf-8"),
            )
            for kind, first, last, new_first, new_last in changes
            if kind != "equal"
        ]

    def edits_of(self, found: Fix) -> list[types.TextEdit]:
        """A fix as the editor makes it."""
        if self._has_lone_cr:
            return self.edits_to(apply(self.source.data, found.edits))
        return [
            types.TextEdit(self.range_of(edit.start, edit.end), edit.text) for edit in found.edits
        ]

    @cached_property
    def _has_lone_cr(self) -> bool:
        return _LONE_CR.search(self.source.data) is not None

    @cached_property
    def fix_all(self) -> list[types.TextEdit]:
        """The safe fixes, until nothing changes."""
        if not any(one.fix and one.fix.is_safe for one in self.findings):
            return []
        new, _ = fix(self.source.data, self.rules, unsafe=False, keep=without_silenced)
        return self.edits_to(new)


class _Editor:
    """What an editor has open."""

    def __init__(self, server: LanguageServer, arguments: argparse.Namespace) -> None:
        self._server = server
        self._arguments = arguments
        self._open: dict[str, Optional[_Checked]] = {}  # None for what is not looked at
        self._waiting: dict[str, asyncio.TimerHandle] = {}
        self._said = ""

    def publish(self, uri: str) -> None:
        """Send what is found in an open file; while it does not parse, what was found before stays."""
        self._stop_waiting(uri)
        document = self._server.workspace.get_text_document(uri)
        try:
            checked = self._check(document)
        except Unreadable:
            self._open.setdefault(uri, None)
            return
        self._open[uri] = checked
        shown = [self._diagnostic(checked, one) for one in checked.findings] if checked else []
        self._server.text_document_publish_diagnostics(
            types.PublishDiagnosticsParams(uri, shown, document.version)
        )

    def publish_soon(self, uri: str) -> None:
        """The same, once nobody types."""
        self._stop_waiting(uri)
        loop = asyncio.get_running_loop()
        self._waiting[uri] = loop.call_later(_QUIET_S, self.publish, uri)

    def publish_all(self) -> None:
        """What was saved may be the settings."""
        for uri in list(self._open):
            self.publish(uri)

    def close(self, uri: str) -> None:
        self._stop_waiting(uri)
        self._open.pop(uri, None)
        self._server.text_document_publish_diagnostics(types.PublishDiagnosticsParams(uri, []))

    def actions(self, params: types.CodeActionParams) -> Iterator[types.CodeAction]:
        """What can be done about the findings at the cursor, and about all of the file."""
        uri = params.text_document.uri
        version = self._server.workspace.get_text_document(uri).version
        checked = self._open.get(uri)
        if checked is None or checked.version != version:
            self.publish(uri)
            checked = self._open.get(uri)
        if checked is None or checked.version != version:
            return
        only = params.context.only or [types.CodeActionKind.Empty]
        if _is_asked(types.CodeActionKind.QuickFix, only):
            for one in checked.findings:
                diagnostic = self._diagnostic(checked, one)
                if _do_meet(diagnostic.range, params.range):
                    yield from _fixes(uri, checked, one, diagnostic)
        if _is_asked(_FIX_ALL, only) and checked.fix_all:
            title = "Fix everything that flambeau lint can fix safely"
            edit = types.WorkspaceEdit(changes={uri: checked.fix_all})
            yield types.CodeAction(title, _FIX_ALL, edit=edit)

    def _check(self, document: TextDocument) -> Optional[_Checked]:
        """None for what is no Python, and for what the settings leave out.

        Raises:
            Unreadable: if it cannot be parsed, as half a word seldom can.
        """
        if document.language_id != "python":
            return None
        found = FolderSettings(self._arguments)
        try:
            settings = found.of(Path(document.path).parent)
        except WrongUsage as error:
            self._say(str(error), types.MessageType.Error)
            return None
        for note in found.notes:
            self._say(note, types.MessageType.Warning)
        if is_excluded(Path(document.path), settings):
            return None
        (job,) = jobs_for([document.path], settings)
        rules = rules_of(job.codes)
        data = document.source.encode("utf-8", "replace")  # half a surrogate becomes '?', as long
        findings = without_silenced(data, lint(data, rules))
        return _Checked(document, document.version, Source(data), rules, findings)

    def _diagnostic(self, checked: _Checked, one: Finding) -> types.Diagnostic:
        rule = BY_CODE[one.code]
        page = _page_of(rule.code)
        return types.Diagnostic(
            checked.range_of(one.start, one.end),
            rule.zh if self._arguments.zh else one.message,
            severity=_SEVERITIES[LEVELS[rule.kind]],
            code=rule.code,
            code_description=types.CodeDescription(page) if page else None,
            source=_NAME,
            tags=[types.DiagnosticTag.Deprecated] if rule.kind == "deprecated" else None,
            data={"kind": rule.kind, "name": rule.name},
        )

    def _say(self, text: str, kind: types.MessageType) -> None:
        """Not at each keystroke."""
        if text and text != self._said:
            self._server.window_show_message(types.ShowMessageParams(kind, text))
        self._said = text

    def _stop_waiting(self, uri: str) -> None:
        if (timer := self._waiting.pop(uri, None)) is not None:
            timer.cancel()


def _lines(source: Source) -> list[bytes]:
    """With their ends."""
    starts = [*source.starts, len(source.data)]
    return [source.data[start:end] for start, end in zip(starts, starts[1:])]


def _fixes(
    uri: str, checked: _Checked, one: Finding, diagnostic: types.Diagnostic
) -> Iterator[types.CodeAction]:
    """The fix of a finding, and the comment that silences it."""
    rule = BY_CODE[one.code]
    found = []
    if one.fix is not None:
        doubt = "" if one.fix.is_safe else ", which may change what the program does"
        title = f"Fix {one.code} ({rule.name}){doubt}"
        found.append((title, checked.edits_of(one.fix), one.fix.is_safe))
    silenced = checked.edits_to(add_noqa(checked.source.data, [one]))
    found.append((f"Silence {one.code} in this line: # noqa", silenced, False))
    for title, edits, is_preferred in found:
        yield types.CodeAction(
            title,
            types.CodeActionKind.QuickFix,
            diagnostics=[diagnostic],
            is_preferred=is_preferred,
            edit=types.WorkspaceEdit(changes={uri: edits}),
        )


def _is_asked(kind: str, only: Sequence[str]) -> bool:
    """Whether an editor that asks for some kinds of actions, such as all of `source`, means this one."""
    # Added, not formatted: an enum of strings is formatted as its name since Python 3.12.
    return any(not asked or (kind + ".").startswith(asked + ".") for asked in only)


def _do_meet(one: types.Range, other: types.Range) -> bool:
    return bool(one.start <= other.end and other.start <= one.end)


def _page_of(code: str) -> str:
    """The address of a file with the page of a rule; empty where no file can be written."""
    page = cache_folder() / "rules" / f"{code}.md"
    try:
        if not page.exists():
            page.parent.mkdir(parents=True, exist_ok=True)
            page.write_text(rule_page(BY_CODE[code]), encoding="utf-8")
    except OSError:
        return ""
    return page.resolve().as_uri()
