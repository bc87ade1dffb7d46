"""How many findings of `flambeau lint` in public code are right: judged by reading the code around each.

    python bench/lint_precision.py
    python bench/lint_precision.py --find CLONES [--rules CODES] [--target V] [--from V] > judge.jsonl
    python bench/lint_precision.py --add judge.jsonl

results/lint_precision.jsonl holds one judged place per line: repository, commit, path, line and rule; whether
the code has what the rule says and the proposal fits there ('right'), and in one clause why not; whether the
fix would break the program ('fix_breaks'); what is said of the place after the rules were changed ('now').
The samples are drawn per rule and spread over the repositories: 1 before any change (up to 12 places per
rule), 2 to 4 each after changes, of places that no sample had yet (3 from all findings alike); 5 is of the
rules that only `--from` turns on ('from'), before they were changed; 6 is of further repositories, the rules
first that had not fired before, and 7 of all their findings alike, after the changes that 6 asked for. Those
after 7 are all findings, in the same repositories, of rules that were written or widened since.
Prints the share per sample, and per rule what was wrong.

CLONES holds git repositories in folders called owner+name, of which nothing is checked out. `--find` reads
each at the commit of its facts, and prints the findings that no fact has, of rules that no fact has or of
CODES, each with the lines around it; the facts of places that are reported no more become 'not reported'.
Whoever judges writes true or false in place of each null, and 'why' beside false. `--add` appends them.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FACTS = ROOT / "bench" / "results" / "lint_precision.jsonl"
PLACE = ("repository", "path", "cell", "line", "rule", "target", "from")
"""What tells a fact from all others."""
READ = (b".py", b".ipynb", b".md", b".rst")
NEWEST = "2.15"
AROUND = 4
"""Lines shown on each side of a finding. Chosen."""
Fact = dict[str, Any]


def facts() -> list[Fact]:
    return [json.loads(line) for line in FACTS.read_text("utf-8").splitlines()]


def write(rows: list[Fact]) -> None:
    FACTS.write_text("".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows), "utf-8")


def place(row: Fact) -> tuple[Any, ...]:
    return tuple(row.get(key) for key in PLACE)


# ---------------------------------------------------------------- finding what is not judged yet


def git(folder: Path, *words: str, given: bytes = b"") -> bytes:
    command = ["git", "--git-dir", f"{folder}", *words]
    return subprocess.run(command, input=given, capture_output=True, check=True).stdout


def clones(folder: Path) -> Iterator[tuple[str, Path]]:
    """(owner/name, the folder with its HEAD) of each."""
    for one in sorted(folder.iterdir()):
        heads = [one, one / ".git", one / "repo", one / "repo" / ".git"]
        found = [head for head in heads if (head / "HEAD").is_file()]
        if "+" in one.name and found:
            yield one.name.replace("+", "/", 1), found[0]


def unpack(clone: Path, commit: str, into: Path) -> None:
    """Write the files that are linted; links, and blobs that the clone lacks, are left out."""
    listed = []
    for row in git(clone, "ls-tree", "-r", "-z", commit).split(b"\0"):
        head, _, path = row.partition(b"\t")
        if path.endswith(READ) and not head.startswith(b"120000"):
            listed.append((head.split()[2], path))
    names = b"".join(name + b"\n" for name, _ in listed)
    text = git(clone, "cat-file", "--batch", given=names)
    for _, path in listed:
        head, _, text = text.partition(b"\n")
        if head.endswith(b" missing"):
            continue
        size = int(head.split()[2])
        target = into / os.fsdecode(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text[:size])
        text = text[size + 1 :]


def findings(folder: Path, versions: list[str]) -> list[Fact]:
    words = [sys.executable, "-m", "flambeau_lint", *versions, "--no-cache", "--exit-zero"]
    done = subprocess.run(
        [*words, "--output-format", "json", "."],
        cwd=folder, env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}"}, capture_output=True, check=True,
    )  # fmt: skip
    return [row for row in json.loads(done.stdout) if "code" in row]


def code_around(file: Path, row: Fact) -> list[str]:
    if row["cell"] is not None and file.suffix == ".ipynb":
        cells = json.loads(file.read_text("utf-8"))["cells"]
        lines = "".join(cells[row["cell"] - 1]["source"]).splitlines()
    else:
        lines = file.read_text("utf-8", "replace").splitlines()
    return lines[max(row["line"] - 1 - AROUND, 0) : row["line"] + AROUND]


def find(arguments: argparse.Namespace) -> None:
    rows = facts()
    commits = {row["repository"]: row["commit"] for row in rows}
    judged = {row["rule"] for row in rows}
    rules = set(arguments.rules.split(",")) if arguments.rules else None
    about = {key: getattr(arguments, key) for key in ("target", "from") if getattr(arguments, key)}
    versions = ["--target", arguments.target or NEWEST]
    versions += ["--from", about["from"]] if "from" in about else []
    reported, here = set(), set()
    for repository, clone in clones(arguments.find):
        commit = commits.get(repository) or git(clone, "rev-parse", "HEAD").decode().strip()
        with tempfile.TemporaryDirectory() as folder:
            into = Path(folder, repository.replace("/", "+"))
            into.mkdir()
            unpack(clone, commit, into)
            here.add(repository)
            for found in findings(into, versions):
                row = {"repository": repository, "commit": commit, "path": found["file"]}
                row |= {"cell": found["cell"]} if found["cell"] else {}
                row |= {"line": found["line"], "rule": found["code"], **about}
                if place(row) in reported:
                    continue
                reported.add(place(row))
                is_wanted = row["rule"] in rules if rules else row["rule"] not in judged
                if is_wanted and place(row) not in {place(one) for one in rows}:
                    code = code_around(into / found["file"], found)
                    print(json.dumps({**row, "right": None, "code": code}), flush=True)
    for row in rows:
        is_same = {key: row[key] for key in ("target", "from") if key in row} == about
        if row["repository"] in here and is_same:
            is_reported = place(row) in reported
            if is_reported == (row["now"] == "not reported"):
                print(f"{'again' if is_reported else 'no longer'} reported: {row}", file=sys.stderr)
                row["now"] = row["now"] if is_reported else "not reported"
    write(rows)


# ---------------------------------------------------------------- adding what is


def add(file: Path) -> None:
    rows = facts()
    known = {place(row) for row in rows}
    sample = max(row["sample"] for row in rows) + 1
    for number, line in enumerate(file.read_text("utf-8").splitlines(), 1):
        row = json.loads(line)
        row.pop("code", None)
        if row.get("right") not in (True, False) or not (row["right"] or row.get("why")):
            sys.exit(f"{file}:{number}: 'right' must be true, or false with a 'why'")
        if place(row) in known:
            sys.exit(f"{file}:{number}: that place is judged already")
        known.add(place(row))
        rows.append({"sample": sample, **row, "now": "right" if row["right"] else "wrong"})
    write(rows)


# ---------------------------------------------------------------- counting


def count() -> None:
    rows = facts()
    for sample in sorted({row["sample"] for row in rows}):
        of_sample = [row for row in rows if row["sample"] == sample]
        right = sum(row["right"] is True for row in of_sample)
        repositories = len({row["repository"] for row in of_sample})
        rules = len({row["rule"] for row in of_sample})
        head = f"sample {sample}: {right} of {len(of_sample)} right ({right / len(of_sample):.1%})"
        print(f"{head}, {rules} rules, {repositories} repositories")
    print(
        "now:",
        ", ".join(f"{count} {word}" for word, count in Counter(row["now"] for row in rows).items()),
    )
    wrong: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        if not row["right"]:
            wrong[str(row["rule"])][str(row["why"])] += 1
    for rule, reasons in sorted(wrong.items()):
        for reason, count in reasons.items():
            print(f"{rule}: {count} wrong: {reason}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--find", type=Path, metavar="CLONES")
    parser.add_argument("--rules", metavar="CODES", help="with --find")
    parser.add_argument("--target", metavar="VERSION", help="with --find")
    parser.add_argument("--from", metavar="VERSION", help="with --find")
    parser.add_argument("--add", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    if arguments.find:
        find(arguments)
        return
    if arguments.add:
        add(arguments.add)
    count()


if __name__ == "__main__":
    main()
