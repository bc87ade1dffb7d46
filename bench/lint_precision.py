"""How many findings of `flambeau lint` in public code are right: judged by reading the code around each.

    python bench/lint_precision.py

results/lint_precision.jsonl holds one judged place per line: repository, commit, path, line and rule; whether
the code has what the rule says and the proposal fits there ('right'), and in one clause why not; whether the
fix would break the program ('fix_breaks'); what is said of the place after the rules were changed ('now').
The samples are drawn per rule and spread over the repositories: 1 before any change (up to 12 places per
rule), 2 to 4 each after changes, of places that no sample had yet (3 from all findings alike); 5 is of the
rules that only `--from` turns on ('from'), before they were changed; 6 is of further repositories, the rules
first that had not fired before, and 7 of all their findings alike, after the changes that 6 asked for.
Prints the share per sample, and per rule what was wrong.
"""

import json
from collections import Counter, defaultdict
from pathlib import Path

FACTS = Path(__file__).parent / "results" / "lint_precision.jsonl"


def facts() -> list[dict[str, object]]:
    return [json.loads(line) for line in FACTS.read_text("utf-8").splitlines()]


def main() -> None:
    rows = facts()
    for sample in sorted({str(row["sample"]) for row in rows}):
        of_sample = [row for row in rows if str(row["sample"]) == sample]
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


if __name__ == "__main__":
    main()
