"""`flambeau-lint`: the command line."""

import argparse
import difflib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn, Optional, TextIO

from flambeau_lint import reports
from flambeau_lint.checked_file import Checked, fixed
from flambeau_lint.files import find_files, is_excluded, unsaved, write
from flambeau_lint.many_files import Job, cache_folder, check_files, rules_of
from flambeau_lint.rules.catalog import BY_CODE, RULES, is_selected
from flambeau_lint.selection import FolderSettings, jobs_for, refuse_unknown
from flambeau_lint.settings import Settings, WrongUsage
from flambeau_lint.source import Unreadable, decode
from flambeau_lint.suppressions import add_noqa, useless_comments
from flambeau_lint.virtual import is_python

HELP = "find and fix what a newer torch has removed, deprecated or changed in scripts"
EPILOG = "'rule FLB101' in place of paths shows the page of a rule, 'rule all' those of all."


_FLAGS: Sequence[tuple[str, str]] = (
    ("--fix", "change the files: fixes that keep what the program does"),
    ("--unsafe-fixes", "with --fix or --diff: also fixes that may change what it does"),
    ("--diff", "print what --fix would change, and change nothing"),
    ("--allow-dirty", "also write files that git could not bring back"),
    ("--preview", "also rules that are not proved on enough code yet"),
    ("--force-exclude", "leave out what --exclude says also where it is named (pre-commit)"),
    ("--statistics", "how often each rule was found, and not where"),
    ("--add-noqa", "write '# noqa: CODE' behind each line in which something is found"),
    ("--exit-zero", "exit code 0 whatever is found"),
    ("--no-cache", "do not use what is known of unchanged files"),
    ("--zh", "messages in Chinese"),
    ("--server", "answer an editor, as a language server over standard input and output"),
)
_OF_SERVER = ("--preview", "--zh", "--server")
_EXCLUDE: Sequence[tuple[str, tuple[str, ...]]] = (
    ("--diff", ("--fix", "--add-noqa", "--statistics", "--output-format")),
    ("--add-noqa", ("--fix", "--statistics", "--output-format")),
    ("--statistics", ("--output-format",)),
    ("--zh", ("--diff", "--add-noqa", "--statistics")),
)
_NEED: Sequence[tuple[str, tuple[str, ...]]] = (
    ("--unsafe-fixes", ("--fix", "--diff")),
    ("--allow-dirty", ("--fix", "--add-noqa")),
)
_LISTS: Sequence[tuple[str, str, str]] = (
    ("--select", "CODES", "only these rules: FLB101, FLB1, a kind such as removed, a name, ALL"),
    ("--ignore", "CODES", "all but these"),
    ("--extend-select", "CODES", "these as well"),
    ("--exclude", "GLOBS", "files and folders to leave out"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags, for the commands `flambeau-lint` and `flambeau lint`."""
    add = parser.add_argument
    add(
        "paths",
        metavar="PATH",
        nargs="*",
        default=["."],
        help="files and folders; this one by default",
    )
    for flag, text in _FLAGS:
        add(flag, action="store_true", help=text)
    for flag, word, text in _LISTS:
        add(flag, metavar=word, action="append", help=text)
    target = "the torch that the files are for; by default the installed one"
    add("--target", metavar="VERSION", help=target)
    since = "the torch that they were written for: also what has silently changed since then"
    add("--from", dest="since", metavar="VERSION", help=since)
    formats = ("text", "json", "sarif", "github")
    add("--output-format", choices=formats, default="text", help="text by default")
    add("--jobs", type=int, default=0, metavar="N", help="processes; one per core by default")
    parser.epilog = EPILOG


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise WrongUsage(f"{message} (--help lists all flags)")


def main(words: Optional[Sequence[str]] = None) -> int:
    """Run the command.

    Returns:
        0 if nothing was found, 1 if something was, 2 for wrong usage.
    """
    parser = _Parser(prog="flambeau-lint", description=HELP, allow_abbrev=False)
    add_arguments(parser)
    try:
        code = run(parser.parse_args(words))
        if not sys.stdout.closed:  # as a server leaves it
            sys.stdout.flush()
        return code
    except WrongUsage as error:
        _say(f"flambeau-lint: {error}")
        return 2
    except BrokenPipeError:  # the reader has gone (`| head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # a full disk, a folder that is closed
        where = f"{reports.printable(error.filename)}: " if isinstance(error.filename, str) else ""
        _say(f"flambeau-lint: {where}{error.strerror or error}")
        return 2
    except KeyboardInterrupt:
        _say("flambeau-lint: interrupted")
        return 130


def run(arguments: argparse.Namespace) -> int:
    """Run it on flags that are parsed.

    Raises:
        WrongUsage: if they cannot be.
    """
    if arguments.paths[0] == "rule" and not Path("rule").exists():
        return _show_rules(arguments)
    if arguments.server:
        return _serve(arguments)
    _refuse_contradictions(arguments)
    jobs = _jobs(arguments)
    if arguments.add_noqa:
        return _add_noqa(jobs, arguments)
    if arguments.diff:
        return _diff(jobs, arguments)
    left = _fix(jobs, arguments) if arguments.fix else 0
    cache = None if arguments.no_cache else cache_folder()
    found = list(check_files(jobs, jobs_at_once=arguments.jobs, cache=cache))
    _print(found, arguments)
    is_found = any(file.places for file in found) and not arguments.exit_zero
    is_lost = any(file.is_lost for file in found)
    return left or (2 if is_lost else int(is_found))


def _given(arguments: argparse.Namespace) -> list[str]:
    """The flags that were given and are no lists or versions."""
    given = [flag for flag, _ in _FLAGS if getattr(arguments, flag[2:].replace("-", "_"))]
    given += ["--jobs"] if arguments.jobs else []
    return given + ([] if arguments.output_format == "text" else ["--output-format"])


def _refuse_contradictions(arguments: argparse.Namespace) -> None:
    given = _given(arguments)
    for flag, others in _EXCLUDE:
        for other in others:
            if flag in given and other in given:
                raise WrongUsage(f"{flag} and {other} exclude each other")
    for flag, others in _NEED:
        if flag in given and not any(other in given for other in others):
            raise WrongUsage(f"{flag} has no effect without {' or '.join(others)}")
    if arguments.jobs < 0:
        raise WrongUsage(f"--jobs {arguments.jobs}: must be a number of processes")


def _jobs(arguments: argparse.Namespace) -> list[Job]:
    """The files below the paths, each with the rules that the settings of its folder turn on."""
    by_folder: dict[Path, list[str]] = {}
    for text in arguments.paths:
        folder = Path(text) if Path(text).is_dir() else Path(text).parent
        by_folder.setdefault(folder, []).append(text)
    found = FolderSettings(arguments)
    nearest: dict[str, Settings] = {}
    for folder, paths in by_folder.items():
        around = found.of(folder)
        for file in find_files(paths, around, force_exclude=arguments.force_exclude):
            own = found.of(Path(file).parent)
            if own is around or not is_excluded(Path(file), own):
                nearest.setdefault(file, own)
    for note in found.notes:
        _say(note)
    if not nearest and not arguments.force_exclude:
        raise WrongUsage(f"no Python files, notebooks or pages in {', '.join(arguments.paths)}")
    jobs: dict[str, Job] = {}
    for settings in {id(one): one for one in nearest.values()}.values():
        files = [file for file, one in nearest.items() if one is settings]
        jobs.update((job.path, job) for job in jobs_for(files, settings))
    return [jobs[file] for file in nearest]


def _serve(arguments: argparse.Namespace) -> int:
    """What an editor has open, in place of files."""
    words = [flag for flag in _given(arguments) if flag not in _OF_SERVER]
    words += [] if arguments.paths == ["."] else arguments.paths
    if words:
        raise WrongUsage(f"{words[0]} and --server exclude each other: the editor has the files")
    try:
        from flambeau_lint.server import serve
    except ModuleNotFoundError as error:
        if error.name not in ("pygls", "lsprotocol"):
            raise
        raise WrongUsage(
            "--server needs the package pygls\nInstall it: pip install 'pygls>=2.1'"
        ) from None
    return serve(arguments, _version())


def _show_rules(arguments: argparse.Namespace) -> int:
    words = arguments.paths[1:]
    kind = arguments.output_format
    if not words:
        raise WrongUsage("rule: name a code, such as 'rule FLB101', or 'rule all'")
    given = [
        f"--output-format {kind}" if one == "--output-format" else one for one in _given(arguments)
    ]
    names = {flag: flag[2:].replace("-", "_") for flag, *_ in _LISTS}
    names |= {"--target": "target", "--from": "since"}
    given += [flag for flag, name in names.items() if getattr(arguments, name)]
    for flag in given:
        if flag != "--output-format json":
            raise WrongUsage(
                f"{flag} has no effect on 'rule', which takes --output-format json alone"
            )
    refuse_unknown(words)
    rules = [rule for rule in RULES if is_selected(rule, words)]
    if kind == "json":
        _print_text(reports.rules_as_json(rules) + "\n")
    else:
        _print_text("".join(map(reports.rule_page, rules)))
    return 0


# ---------------------------------------------------------------- writing


def _changes(
    jobs: Sequence[Job], failed: dict[str, Exception], *, unsafe: bool
) -> Iterator[tuple[str, bytes, bytes, int]]:
    """(path, old bytes, new bytes, fixes) of each file that has any; `failed` gets those that cannot be."""
    for job in jobs:
        try:
            raw = Path(job.path).read_bytes()
            new, count = fixed(job.path, raw, rules_of(job.codes), unsafe=unsafe)
        except (OSError, Unreadable) as error:
            failed[job.path] = error
            continue
        if new != raw:
            yield job.path, raw, new, count


def _say_failed(failed: dict[str, Exception]) -> int:
    """2 if some could not be read at all."""
    for path, error in failed.items():
        _say_problem(path, getattr(error, "strerror", "") or str(error))
    return 2 if any(isinstance(error, OSError) for error in failed.values()) else 0


def _say_problem(path: str, problem: str) -> None:
    _say(f"{reports.printable(path)}: not linted: {problem}")


def _fix(jobs: Sequence[Job], arguments: argparse.Namespace) -> int:
    """Write what the fixes make of the files; 2 if some are not written."""
    changes = list(_changes(jobs, {}, unsafe=arguments.unsafe_fixes))  # the check says what failed
    written, code = _write_all([change[:3] for change in changes], arguments)
    count = sum(made for path, _, _, made in changes if path in written)
    if count:
        _say(f"{count} fixed in {_files(len(written))}")
    return code


def _write_all(
    changes: Sequence[tuple[str, bytes, bytes]], arguments: argparse.Namespace
) -> tuple[set[str], int]:
    """The paths that are written, and 2 if some are not."""
    refused = _refused([path for path, *_ in changes], arguments)
    written = set()
    for path, old, new in changes:
        if path in refused:
            continue
        try:
            write(path, old, new)
            written.add(path)
        except WrongUsage as error:
            _say(reports.printable(str(error)))
    return written, 2 if len(written) < len(changes) else 0


def _files(count: int) -> str:
    return f"{count} {'file' if count == 1 else 'files'}"


def _refused(paths: Sequence[str], arguments: argparse.Namespace) -> dict[str, str]:
    refused = {} if arguments.allow_dirty else unsaved(paths)
    for path, reason in refused.items():
        _say(
            f"{reports.printable(path)} is not written: it {reason}; --allow-dirty writes it all the same"
        )
    return refused


def _diff(jobs: Sequence[Job], arguments: argparse.Namespace) -> int:
    is_any = False
    failed: dict[str, Exception] = {}
    for path, old, new, _ in _changes(jobs, failed, unsafe=arguments.unsafe_fixes):
        is_any = True
        before, after = (_lines(one, path) for one in (old, new))
        name = reports.printable(path)
        for line in difflib.unified_diff(before, after, f"a/{name}", f"b/{name}"):
            _print_text(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n")
    return _say_failed(failed) or int(is_any and not arguments.exit_zero)


def _lines(raw: bytes, path: str) -> list[str]:
    if is_python(Path(path)):
        data, _, _ = decode(raw)
        raw = data
    return [
        line + "\n"
        for line in raw.decode("utf-8", "replace").replace("\r\n", "\n").split("\n")[:-1]
    ] + ([] if raw.endswith(b"\n") else [raw.decode("utf-8", "replace").rpartition("\n")[2]])


def _add_noqa(jobs: Sequence[Job], arguments: argparse.Namespace) -> int:
    from flambeau_lint.engine import lint
    from flambeau_lint.source import encode
    from flambeau_lint.suppressions import without_silenced

    changes = []
    failed: dict[str, Exception] = {}
    scripts = [job for job in jobs if is_python(Path(job.path))]
    for job in scripts:
        try:
            raw = Path(job.path).read_bytes()
            data, encoding, mark = decode(raw)
            found = without_silenced(data, lint(data, rules_of(job.codes)))
        except (OSError, Unreadable) as error:
            failed[job.path] = error
            continue
        new = encode(add_noqa(data, found), encoding, mark) if found else raw
        if new != raw:
            changes.append((job.path, raw, new))
    written, code = _write_all(changes, arguments)
    others = len(jobs) - len(scripts)
    left = f"; {others} notebooks and pages left as they are" if others else ""
    _say(f"{_files(len(written))} written{left}")
    return _say_failed(failed) or code


# ---------------------------------------------------------------- printing


def _print(found: Sequence[Checked], arguments: argparse.Namespace) -> None:
    for file in found:
        if file.problem and arguments.output_format != "json":
            _say_problem(file.path, file.problem)
    _warn_of_comments(found)
    found = reports.in_chinese(found) if arguments.zh else found
    if arguments.statistics:
        _print_text("".join(f"{line}\n" for line in reports.statistics(found)))
    elif arguments.output_format == "json":
        _print_text(reports.as_json(found) + "\n")
    elif arguments.output_format == "sarif":
        from flambeau_lint.sarif import as_sarif

        _print_text(as_sarif(found, _version()) + "\n")
    elif arguments.output_format == "github":
        _print_text("".join(f"{line}\n" for line in reports.github_lines(found)))
    else:
        lines = reports.text_lines(found)
        _print_text("".join(f"{line}\n" for line in lines))
        _print_text(reports.summary(found, chinese=arguments.zh) + "\n")


def _warn_of_comments(found: Sequence[Checked]) -> None:
    for file in found:
        if not is_python(Path(file.path)) or file.problem:
            continue
        try:
            raw = Path(file.path).read_bytes()
            if not any(word in raw.lower() for word in (b"flb", b"flambeau:")):
                continue
            data, _, _ = decode(raw)
        except (OSError, Unreadable):
            continue
        for line, problem in useless_comments(data, list(BY_CODE)):
            _say(f"{reports.printable(file.path)}:{line}: a comment {problem}")


def _version() -> str:
    from importlib import metadata

    for name in ("flambeau-lint", "flambeau"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "0"


def _print_text(text: str) -> None:
    _write(sys.stdout, text)


def _say(text: str) -> None:
    _write(sys.stderr, f"{text}\n")


def _write(stream: TextIO, text: str) -> None:
    """What the stream's encoding does not have is escaped: a name of a file may hold any bytes."""
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
