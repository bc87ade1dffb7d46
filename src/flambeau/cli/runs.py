"""`flambeau runs`: the runs below a folder, one per row."""

import argparse
import fnmatch
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flambeau.cli.table import print_json, print_table
from flambeau.data.sources.data_names import refuse_address
from flambeau.data.stores.address import address_of, is_address
from flambeau.errors import InputError, nearest
from flambeau.run.folder.summary import (
    STATES,
    RunSummary,
    Search,
    of_sweep,
    summarize,
    sweep_of,
)
from flambeau.terminal import say

HELP = "list the runs in a folder, and those of a sweep as one: data, model, state, best figure"

_COLORS = {"finished": "green", "running": "cyan", "failed": "red", "damaged": "red"}
COLUMNS: dict[str, Callable[[RunSummary], Any]] = {
    "name": lambda run: run.name,
    "data": lambda run: _last(run.data),
    "model": lambda run: _last(run.model),
    "state": lambda run: run.state,
    "best": lambda run: run.best,
    "step": lambda run: run.step,
    "when": lambda run: run.changed,
    "time": lambda run: run.seconds,
}

_DEFAULT = "runs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "folder",
        metavar="DIR",
        nargs="?",
        default=_DEFAULT,
        help="where to look: a folder, or an address in a store (default: runs)",
    )
    add(
        "--state",
        action="append",
        metavar="STATE",
        help=f"only these: {', '.join(STATES)}; may be given several times",
    )
    add(
        "--where",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="only runs with this setting, such as model=resnet18 or 'data=*photos'; several must all hold",
    )
    add(
        "--sort",
        metavar="COLUMN",
        default="when",
        help=f"{', '.join(COLUMNS)} (default: when); --sort=-best begins with the highest",
    )
    add("--reverse", action="store_true", help="the other way round")
    add("--json", action="store_true", help="one JSON object per line, for programs")


def run(arguments: argparse.Namespace) -> int:
    key = arguments.sort.removeprefix("-")
    states = arguments.state or []
    _require(key, COLUMNS, f"--sort {arguments.sort}: unknown column")
    for word in states:
        _require(word, STATES, f"--state {word}: unknown state")
    wanted = [_condition(text) for text in arguments.where]
    if is_address(arguments.folder):
        from flambeau.run.folder.store_runs import runs_below

        address = address_of(arguments.folder).rstrip("/")
        with runs_below(address) as root:
            return _list(arguments, root, address, wanted)
    root = Path(arguments.folder)
    refuse_address(root)
    if not root.exists() and arguments.folder == _DEFAULT:
        say(
            "no runs here: flambeau train makes them in the folder runs; flambeau runs DIR looks in DIR"
        )
        return 0
    if not root.is_dir():
        what = "is not a folder" if root.exists() else "does not exist"
        raise InputError(f"{root} {what}; name the folder that holds your runs: flambeau runs DIR")
    return _list(arguments, root, None, wanted)


def _list(
    arguments: argparse.Namespace,
    root: Path,
    address: str | None,
    wanted: Sequence[tuple[str, str]],
) -> int:
    """Print the runs below a folder, which stands for an address if there is one."""
    place = address or str(root)
    search = Search(root)
    runs = list(_summaries(search, root, address))
    states = arguments.state or []
    rows = [run for run in runs if not states or run.state in states]
    rows = [run for run in rows if all(_holds(run, *condition) for condition in wanted)]
    rows = rows if arguments.json else _grouped(rows, root)
    key = arguments.sort.removeprefix("-")
    rows = _sorted(rows, key, reverse=arguments.sort.startswith("-") != arguments.reverse)
    if not rows:
        _check_keys(runs, [name for name, _ in wanted])
        some = f"none of the {len(runs)} runs in {place} is of this kind" if runs else ""
        say(some or f"no runs in {place}; a run is a folder with a config.toml")
    elif arguments.json:
        print_json(_facts(run, _place(run, root, address)) for run in rows)
    else:
        print_table([*_HEADINGS], map(_cells, rows), right=("time",), styles=_COLORS)
    if search.is_cut:
        say(f"not all folders below {place} were looked into; name one of them: flambeau runs DIR")
    if address is not None and any(run.state == "stopped" for run in rows):
        say(
            "stopped are also runs that another machine is training now: their folder does not tell"
        )
    return 0


def _summaries(search: Search, root: Path, address: str | None) -> Iterator[RunSummary]:
    name = root.resolve().name if address is None else address.rpartition("/")[2]
    root_name = name or str(root)
    for path in search:
        found = summarize(path, name=root_name if path == root else str(path.relative_to(root)))
        if address is not None:
            from flambeau.run.folder.store_runs import as_in_store

            found = as_in_store(found, _place(found, root, address))
        yield found


def _place(run: RunSummary, root: Path, address: str | None) -> str:
    """The folder or the address of a run."""
    if address is None:
        return str(run.path)
    name = run.path.relative_to(root).as_posix()
    return address if name == "." else f"{address}/{name}"


def _grouped(runs: Sequence[RunSummary], root: Path) -> list[RunSummary]:
    """One row in place of the runs of each sweep below the folder; those of the folder itself stay."""
    rows: list[RunSummary] = []
    sweeps: dict[Path, list[RunSummary]] = {}
    for run in runs:
        sweep = sweep_of(run.path)
        if sweep is None or not sweep.is_relative_to(root) or sweep == root:
            rows.append(run)
        else:
            sweeps.setdefault(sweep, []).append(run)
    rows += [
        of_sweep(several, path, name=str(path.relative_to(root)))
        for path, several in sweeps.items()
    ]
    return rows


def _require(word: str, known: Collection[str], what: str) -> None:
    if word not in known:
        raise InputError(f"{what}{nearest(word, known)} (one of {', '.join(known)})")


def _condition(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise InputError(f"--where {text!r}: write KEY=VALUE, such as --where model=resnet18")
    return name.strip().replace("-", "_"), value.strip()


def _settings(run: RunSummary) -> Mapping[str, Any]:
    """Names that --where knows: settings, the user's own table, and the columns that are text."""
    table = run.config.get("config")
    columns = {"name": run.name, "kind": run.kind, "data": run.data, "model": run.model}
    user = {k.replace("-", "_"): v for k, v in table.items()} if isinstance(table, dict) else {}
    return {**{k: v for k, v in columns.items() if v is not None}, **user, **run.config}


def _holds(run: RunSummary, name: str, wanted: str) -> bool:
    settings = _settings(run)
    if name not in settings:
        return False
    value = settings[name]
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return bool(value == float(wanted))
        except ValueError:
            return False
    text = str(value).lower() if isinstance(value, bool) else str(value)
    patterns = [text, _last(text) or text] if name in ("data", "model") else [text]
    return any(text == wanted or fnmatch.fnmatchcase(text, wanted) for text in patterns)


def _check_keys(runs: Sequence[RunSummary], names: Sequence[str]) -> None:
    """Refuse a condition on a setting that no run has: it is probably misspelt."""
    known = {name for run in runs for name in _settings(run)}
    for name in names:
        if known and name not in known:
            raise InputError(
                f"--where {name}=...: no run here has this setting{nearest(name, known)}"
            )


def _sorted(runs: list[RunSummary], key: str, *, reverse: bool) -> list[RunSummary]:
    """By a column; runs without a value there come last."""
    value = COLUMNS[key]
    known = [run for run in runs if value(run) is not None]
    known.sort(key=lambda run: run.name)
    known.sort(key=value, reverse=reverse)
    return known + sorted((r for r in runs if value(r) is None), key=lambda run: run.name)


_HEADINGS = ("name", "data", "model", "state", "best", "when", "time")


def _cells(run: RunSummary) -> list[str | None]:
    best = None if run.best is None else f"{run.metric} {run.best:.4g}"
    if run.best is not None and 0.001 <= abs(run.best) < 1000:
        best = f"{run.metric} {run.best:.4f}"
    changed = run.moment
    return [
        run.name,
        _last(run.data),
        _last(run.model),
        _state_text(run),
        best,
        None if changed is None else f"{changed:%Y-%m-%d %H:%M}",
        _time(run.seconds),
    ]


def _state_text(run: RunSummary) -> str:
    if run.why is not None and run.is_sweep:
        return run.why
    if run.why is not None:
        return f"{run.state}: {run.why}"
    if run.state == "finished" or run.step is None:
        return run.state
    of = f"/{run.steps}" if run.steps is not None else f" of {run.config['duration']}"
    return f"{run.state}, step {run.step}{of}"


def _last(text: str | None) -> str | None:
    """The last part of a path, as a full path would fill the table; a name as it is."""
    return None if text is None else text.rstrip("/").rpartition("/")[2] or text


def _time(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min"


def _facts(run: RunSummary, place: str) -> dict[str, Any]:
    """For programs: with the whole path and all settings."""
    when = None if run.moment is None else run.moment.isoformat(timespec="seconds")
    return {
        "name": run.name,
        "path": place,
        "kind": run.kind,
        "state": run.state,
        "why": run.why,
        "data": run.data,
        "model": run.model,
        "metric": run.metric,
        "best": run.best,
        "step": run.step,
        "steps": run.steps,
        "when": when,
        "seconds": run.seconds,
        "config": run.config,
    }
