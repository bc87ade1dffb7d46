"""How many old public scripts run again after `flambeau lint --fix`, beside TorchFix, ruff and pyupgrade.

    python bench/lint_round_trips.py --corpus FOLDER --peers BIN [--record] [--only WORD]

lint_round_trips.tsv names the scripts: repository, commit, path, the year of their last change, and what they
are started with. Each fails on the newest torch for a reason of torch's or torchvision's own; those that then
lack a file, an argument or another package, and more than twelve of one repository, are left out. FOLDER has
the git repositories as `owner+name/repo`; no line of theirs is kept here. BIN has `torchfix`, `ruff` and
`pyupgrade`.
A script and those files of its repository that it imports are copied into a new folder, each tool rewrites
that copy, and lint_round_trip_driver.py, which says what is made up and what counts as run, runs it.
One JSON line per script, and one that counts.
"""

import argparse
import csv
import json
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from flambeau_lint.rules.catalog import RULES
from provenance import commit, cpu_model, record  # beside this script

TABLE = Path(__file__).with_suffix(".tsv")
DRIVER = Path(__file__).with_name("lint_round_trip_driver.py")
_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+([.\w]+)[ \t]+import[ \t]+\(?([\w*, \t]*)|import[ \t]+([\w., \t]+))", re.M
)
_DATA = {
    ".txt",
    ".csv",
    ".gz",
    ".json",
    ".yaml",
    ".yml",
    ".cfg",
    ".names",
    ".content",
    ".cites",
    ".data",
}
_MOST_BYTES = 8 * 2**20
_MOST_FILES = 64
_LINT = [sys.executable, "-m", "flambeau_lint", "--fix", "--allow-dirty", "--exit-zero"]


def tools(peers: Path) -> dict[str, list[list[str]]]:
    """The commands of each contender, before the names of the files."""
    ruff = [str(peers / "ruff"), "check", "--isolated", "--fix", "--exit-zero", "--quiet"]
    pyupgrade = [str(peers / "pyupgrade"), "--py311-plus", "--exit-zero-even-if-changed"]
    return {
        "as it is": [],
        "flambeau --fix": [_LINT],
        "flambeau --fix --unsafe-fixes": [[*_LINT, "--unsafe-fixes"]],
        "torchfix --fix": [[str(peers / "torchfix"), "--select=ALL", "--fix"]],
        "ruff --fix": [ruff],
        "ruff --fix --unsafe-fixes, UP NPY, pyupgrade": [
            [*ruff, "--unsafe-fixes", "--extend-select=UP,NPY"],
            pyupgrade,
        ],
    }


class Repository:
    """A commit of one, read in place."""

    def __init__(self, folder: Path, commit: str) -> None:
        self._folder = folder
        self._commit = commit
        self.sizes: dict[str, int] = {}
        for line in self._git("ls-tree", "-r", "-l", "-z", commit).decode().split("\0")[:-1]:
            facts, _, path = line.partition("\t")
            size = facts.split()[3]
            self.sizes[path] = int(size) if size.isdecimal() else _MOST_BYTES

    def _git(self, *words: str) -> bytes:
        return subprocess.run(
            ["git", "-C", str(self._folder), *words], capture_output=True, check=True
        ).stdout

    def read(self, path: str) -> bytes:
        return self._git("show", f"{self._commit}:{path}")

    def with_imports(self, script: str) -> dict[str, bytes]:
        """The script and the files of the repository that it imports, directly or not."""
        start = Path(script).parent
        found: dict[str, bytes] = {}
        waiting = [script]
        while waiting:
            path = waiting.pop()
            if path in found:
                continue
            found[path] = self.read(path)
            text = found[path].decode("utf-8", "replace")
            waiting += [one for name in imported(text, path) for one in self._files_of(name, start)]
        return found

    def _files_of(self, name: str, start: Path) -> Iterator[str]:
        """Those of a dotted name, seen from the script's folder or the repository's."""
        for folder in (start, Path()):
            parts = name.split(".")
            for count in range(1, len(parts) + 1):
                inner = folder.joinpath(*parts[:count])
                for path in (f"{inner}.py", f"{inner}/__init__.py"):
                    if path in self.sizes:
                        yield path

    def data_of(self, script: str) -> dict[str, bytes]:
        """The small files of data that stand beside a script or below it."""
        folder = Path(script).parent
        paths = [
            path
            for path, size in self.sizes.items()
            if Path(path).is_relative_to(folder)
            and Path(path).suffix in _DATA
            and size < _MOST_BYTES
        ]
        return {path: self.read(path) for path in paths[:_MOST_FILES]}


def imported(text: str, path: str) -> Iterator[str]:
    """The dotted names that a file imports, those that begin with a dot from its folder on."""
    for module, names, modules in _IMPORT.findall(text):
        if modules:
            yield from (one.split(" as ")[0].strip() for one in modules.split(","))
            continue
        if module.startswith("."):
            depth = len(module) - len(module.lstrip("."))
            folder = Path(path).parents[depth - 1].as_posix().replace("/", ".").strip(".")
            dotted = ".".join(one for one in (folder, module.lstrip(".")) if one)
        else:
            dotted = module
        yield dotted
        yield from (f"{dotted}.{one.split(' as ')[0].strip()}" for one in names.split(","))


def write_files(files: dict[str, bytes], folder: Path) -> list[Path]:
    for path, data in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    return [folder / path for path in files]


def rewritten(scripts: list[dict[str, bytes]], commands: list[list[str]]) -> list[dict[str, bytes]]:
    """The files of each script after a tool has been over all of them, in a folder that goes with it."""
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / str(number) for number in range(len(scripts))]
        paths: list[Path] = []
        for files, folder in zip(scripts, folders, strict=True):
            paths += write_files(files, folder)
        for command in commands:
            subprocess.run(
                [*command, *map(str, paths)], cwd=name, capture_output=True, check=False, input=b""
            )
        return [
            {path: (folder / path).read_bytes() for path in files}
            for files, folder in zip(scripts, folders, strict=True)
        ]


class Driver:
    """The process that runs the copies, without a network."""

    def __init__(self) -> None:
        words = ["unshare", "--net", "--map-root-user", sys.executable, str(DRIVER)]
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def run(self, files: dict[str, bytes], script: str, arguments: list[str]) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        folder = Path(tempfile.mkdtemp())
        write_files(files, folder)
        packages = {
            name.partition(".")[0]
            for path, data in files.items()
            if path.endswith(".py")
            for name in imported(data.decode("utf-8", "replace"), path)
        }
        job = {
            "folder": str(folder),
            "script": script,
            "arguments": arguments,
            "packages": sorted(packages),
        }
        print(json.dumps(job), file=self._process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        shutil.rmtree(folder, ignore_errors=True)
        return {key: value for key, value in answer.items() if key not in job}

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def in_words(answer: dict[str, Any]) -> str:
    if answer["outcome"] == "ran":
        return f"ran: {answer['how']}"
    message = re.sub(r" ?\(/.*|/\S*/", "", str(answer.get("message", "")))
    return f"{answer.get('error', answer['outcome'])}: {message[:70]}"


def read_scripts(
    rows: list[dict[str, str]], corpus: Path
) -> tuple[list[dict[str, bytes]], list[dict[str, bytes]]]:
    """Of each row, the Python files and the data."""
    scripts = []
    data = []
    for row in rows:
        place = corpus / row["repository"].replace("/", "+") / "repo"
        repository = Repository(place, row["commit"])
        scripts.append(repository.with_imports(row["path"]))
        data.append(repository.data_of(row["path"]))
    return scripts, data


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--peers", type=Path, required=True)
    parser.add_argument("--contenders", default="", help="those whose name has this word, and none")
    parser.add_argument("--only", default="", help="those whose repository or path has this word")
    parser.add_argument("--record", action="store_true", help="append to bench/results")
    told = parser.parse_args()
    at = commit()  # before the results are changes of it
    with TABLE.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    rows = [row for row in rows if told.only in f"{row['repository']}/{row['path']}"]
    contenders = {
        name: commands
        for name, commands in tools(told.peers).items()
        if told.contenders in name or not commands
    }
    counts = dict.fromkeys(contenders, 0)
    scripts, data = read_scripts(rows, told.corpus)
    made = {name: rewritten(scripts, commands) for name, commands in contenders.items()}
    driver = Driver()
    for number, row in enumerate(rows):
        seen: dict[tuple[bytes, ...], str] = {}
        outcomes = {}
        for name, versions_of in made.items():
            new = versions_of[number]
            key = tuple(new.values())
            if key not in seen:
                files = {**data[number], **new}
                seen[key] = in_words(driver.run(files, row["path"], row["arguments"].split()))
            counts[name] += seen[key].startswith("ran")
            is_changed = new != scripts[number]
            outcomes[name] = seen[key] if is_changed or not contenders[name] else "unchanged"
        line = {key: row[key] for key in ("repository", "commit", "path", "year")}
        record({**line, "outcomes": outcomes}, __file__, keep=told.record)
    driver.close()
    versions = {name: version(name) for name in ("torch", "torchvision", "numpy")}
    summary = {
        "summary": f"{len(rows)} scripts",
        "ran": counts,
        "rules": len(RULES),
        "versions": {"python": platform.python_version(), **versions, **peer_versions(told.peers)},
        "cpu": cpu_model(),
        "commit": at,
    }
    record(summary, __file__, keep=told.record)


def peer_versions(peers: Path) -> dict[str, str]:
    script = "from importlib.metadata import version\n" + "\n".join(
        f"print('{name}', version('{name}'))" for name in ("TorchFix", "ruff", "pyupgrade")
    )
    text = subprocess.run(
        [str(peers / "python"), "-c", script], capture_output=True, text=True, check=True
    ).stdout
    return dict(line.split() for line in text.splitlines())


if __name__ == "__main__":
    main()
