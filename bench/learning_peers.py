"""Asks TrainCheck and `flambeau doctor --learning` about the same scripts, each with one planted mistake.

    python bench/learning_peers.py --traincheck PYTHON [--minutes 40] [--only WORD] [--record]

PYTHON is one of an environment with `traincheck` and a torch built without CUDA where there is no GPU: with
the CUDA build TrainCheck 0.2.0 ends in 'Found no NVIDIA driver' before the script begins.

The scripts are the planted ones of tests/tune/learning that have a healthy twin here (`TWINS`, the mistake
undone), in an order drawn by chance, until the minutes are over. TrainCheck learns what is normal from a good
run, so it gets the best one there is, the twin: collect its trace, infer invariants, collect and check the
planted script, and the twin with another seed, each traced whole, as its tutorial does. A mistake counts as
found if an invariant is violated that the twin with the other seed does not violate. The twin is accused if
it violates any. Both are counted a second time without the invariants about the order of calls
(FunctionCoverRelation, FunctionLeadRelation), which its own tutorial says to ignore.

doctor sees the planted script and the twin alone. It has found the mistake if a finding has its line, and
accuses the twin if a finding is certain or likely.

Others were looked at and not run: cockpit-for-pytorch 1.0.2 draws instruments and names no mistake.
"""

import argparse
import csv
import json
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from learning_mistakes import SCRIPTS, findings, is_named  # beside this script
from provenance import commit, cpu_model, record

ORDER = {"FunctionCoverRelation", "FunctionLeadRelation"}
"""Relations of invariants that say which call comes before which, or together with which."""

TWINS = {
    "pixels_not_scaled.py": ("images[index].float()", "images[index].float() / 128 - 1"),
    "ema_never_moves.py": ("EMA_DECAY = 0.99999", "EMA_DECAY = 0.9"),
    "functional_dropout.py": ("F.dropout(x, 0.6)", "F.dropout(x, 0.6, self.training)"),
    "loss_maximized.py": ("return log_p.gather", "return -log_p.gather"),
    "normalized_twice.py": ("return raw / 255, y", "return raw, y"),
    "all_weights_zero.py": (
        "nn.init.zeros_(parameter)",
        "nn.init.normal_(parameter, std=0.1)",
    ),
    "dropout_in_validation.py": (
        "        logits = model(x_val)\n",
        "        model.eval()\n        logits = model(x_val)\n        model.train()\n",
    ),
    "validation_in_training.py": ("x, y = oversample(x, y)\n", "\n"),
    "parameter_listed_twice.py": ("    parameters += list(model.head.parameters())\n", ""),
    "permuted_apart.py": ("labels[torch.randperm(640)]", "labels[order]"),
    "next_token_not_shifted.py": ("targets = tokens[:, :-1]", "targets = tokens[:, 1:]"),
    "clamped_logits_bce.py": (".clamp(1e-6, 1 - 1e-6)", ".sigmoid()"),
    "scheduler_before_optimizer.py": (
        "    scheduler.step()\n    for _ in range(12):",
        "    if step:\n        scheduler.step()\n    for _ in range(12):",
    ),
    "scaled_without_scaler_step.py": (
        "self.optimizer.step()",
        "self.scaler.step(self.optimizer)\n        self.scaler.update()",
    ),
    "head_replaced_late.py": (
        "    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)\n"
        "    model.fc = nn.Linear(48, num_classes)\n",
        "    model.fc = nn.Linear(48, num_classes)\n"
        "    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)\n",
    ),
    "accumulation_without_division.py": ("loss.backward()", "(loss / ACCUMULATE).backward()"),
    "cleared_before_step.py": (
        "        loss.backward()\n        self.optimizer.zero_grad(set_to_none=False)\n",
        "        self.optimizer.zero_grad(set_to_none=False)\n        loss.backward()\n",
    ),
    "loss_rewrapped.py": (
        "    values = [part.item() for part in losses]\n"
        "    total = torch.tensor(values, requires_grad=True).mean()\n",
        "    total = torch.stack(losses).mean()\n",
    ),
    "no_grad_around_encoder.py": (
        "        with torch.no_grad():\n            code = self.encode(x)\n",
        "        code = self.encode(x)\n",
    ),
    "parameter_in_two_optimizers.py": (
        "torch.optim.SGD(model.parameters(), lr=0.3",
        'torch.optim.SGD(model["body"].parameters(), lr=0.3',
    ),
    "gradients_never_cleared.py": (
        "    loss.backward()\n",
        "    optimizer.zero_grad()\n    loss.backward()\n",
    ),
    "digits_softmax_twice.py": ("return F.softmax(self.fc2(x), dim=1)", "return self.fc2(x)"),
}
"""Of a planted script the text with the mistake, and what stands there in the healthy twin."""

Violations = frozenset[tuple[str, str]]


def read_violations(text: str) -> Violations:
    """Relation and description of each invariant in the text of TrainCheck's `failed.log`."""
    found = set[tuple[str, str]]()
    decoder = json.JSONDecoder()
    position = 0
    while text[position:].strip():
        position += len(text[position:]) - len(text[position:].lstrip())
        one, position = decoder.raw_decode(text, position)
        found.add((one["invariant"]["relation"], one["invariant"]["text_description"]))
    return frozenset(found)


def without_order(violations: Violations) -> Violations:
    return frozenset(one for one in violations if one[0] not in ORDER)


def count(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Of the scripts that ran to the end: how many mistakes were found, and how many twins accused."""
    ran = [row for row in rows if "error" not in row]
    result: dict[str, Any] = {"asked": len(ran)}
    for name, kept in (("", lambda all_of_them: all_of_them), ("_without_order", without_order)):
        found = [row["script"] for row in ran if kept(row["planted"]) - kept(row["twin"])]
        result["found" + name] = len(found)
        result["names_found" + name] = found
        result["twins_accused" + name] = sum(bool(kept(row["twin"])) for row in ran)
    return result


def twin_of(script: str, planted: str) -> str:
    wrong, right = TWINS[script]
    if planted.count(wrong) != 1:
        raise ValueError(f"{script} has this {planted.count(wrong)} times, not once: {wrong}")
    return planted.replace(wrong, right)


def with_model_variable(text: str) -> str:
    """TrainCheck follows a model by a variable's name, so `self.model` becomes one, too."""
    return re.sub(
        r"^( +)self\.model = (.+)$", r"\1model = \2\n\1self.model = model", text, flags=re.M
    )


class TrainCheck:
    """Its four commands, as its guide has them, in one folder."""

    def __init__(self, python: Path, folder: Path, *, limit_s: float) -> None:
        self.programs = python.parent
        self.folder = folder
        self.limit_s = limit_s

    def call(self, *words: str) -> None:
        command = [str(self.programs / words[0]), *words[1:]]
        path = f"{self.programs}{os.pathsep}{os.environ['PATH']}"
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": path, "HOME": str(self.folder)}
        environ.pop("PYTHONPATH", None)
        done = subprocess.run(
            command, cwd=self.folder, env=environ, capture_output=True, text=True,
            timeout=self.limit_s, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{words[0]} ended with {done.returncode}: {done.stderr[-300:]}")

    def collect(self, name: str, text: str) -> None:
        (self.folder / f"{name}.py").write_text(with_model_variable(text), encoding="utf-8")
        models = re.findall(r"^ *(\w*(?:model|net)) = ", with_model_variable(text), re.M)
        tracked = ["--models-to-track", *dict.fromkeys(models)] if models else []
        self.call(
            "traincheck-collect", "--pyscript", f"{name}.py", *tracked,
            "--output-dir", f"trace_{name}",
        )  # fmt: skip
        printed = (self.folder / f"trace_{name}" / "program_output.txt").read_text(encoding="utf-8")
        if not printed.rstrip().endswith("code 0"):
            raise RuntimeError(f"{name} did not run to its end: {printed[-300:]}")

    def learn(self, text: str) -> None:
        self.collect("reference", text)
        self.call("traincheck-infer", "-f", "trace_reference", "-o", "invariants.json")

    def check(self, name: str, text: str) -> Violations:
        # Whole: of 426 invariants of one twin 10 were violated with `--invariants`, and 1 without.
        self.collect(name, text)
        self.call(
            "traincheck-check", "-f", f"trace_{name}", "-i", "invariants.json",
            "--no-html-report", "-o", f"result_{name}",
        )  # fmt: skip
        logs = (self.folder / f"result_{name}").rglob("failed.log")
        return frozenset().union(
            *(read_violations(log.read_text(encoding="utf-8")) for log in logs)
        )


def ask_traincheck(python: Path, script: str, *, limit_s: float) -> dict[str, Any]:
    planted = (SCRIPTS / "planted" / script).read_text(encoding="utf-8")
    twin = twin_of(script, planted)
    other_seed = re.sub(r"manual_seed\((\d+)\)", r"manual_seed(1\g<1>)", twin)
    with tempfile.TemporaryDirectory() as folder:
        tool = TrainCheck(python, Path(folder), limit_s=limit_s)
        try:
            tool.learn(twin)
            return {
                "script": script,
                "planted": tool.check("planted", planted),
                "twin": tool.check("twin", other_seed),
            }
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            return {"script": script, "error": f"{type(error).__name__}: {str(error)[:400]}"}


def ask_doctor(script: str, lines: str) -> dict[str, Any]:
    planted = SCRIPTS / "planted" / script
    with tempfile.TemporaryDirectory() as folder:
        twin = Path(folder) / script
        twin.write_text(twin_of(script, planted.read_text(encoding="utf-8")), encoding="utf-8")
        of_twin = findings(twin)
    return {
        "named": is_named(findings(planted), lines),
        "accused": of_twin is None or any(one["sure"] != "look" for one in of_twin),
    }


def children_s() -> float:
    """Processor seconds of the commands that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def version_of(python: Path) -> dict[str, str]:
    code = (
        "import json, sys, torch, importlib.metadata as m; print(json.dumps({"
        "'traincheck': m.version('traincheck'), 'torch': torch.__version__, "
        "'python': '.'.join(map(str, sys.version_info[:3]))}))"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    versions: dict[str, str] = json.loads(done.stdout)
    return versions


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--traincheck", type=Path, required=True, metavar="PYTHON")
    parser.add_argument("--minutes", type=float, default=40, help="begin no script after these")
    parser.add_argument("--limit", type=float, default=400, help="seconds for one of its commands")
    parser.add_argument("--only", default="", help="scripts whose name has this word")
    parser.add_argument("--record", action="store_true", help="append to bench/results")
    arguments = parser.parse_args()
    text = (SCRIPTS / "planted" / "found.tsv").read_text(encoding="utf-8")
    table = list(csv.DictReader(text.splitlines(), delimiter="\t"))
    scripts = [row for row in table if row["script"] in TWINS and arguments.only in row["script"]]
    random.Random(0).shuffle(scripts)
    began = time.perf_counter()
    rows, of_doctor = list[dict[str, Any]](), list[dict[str, Any]]()
    used_s = {"traincheck": 0.0, "doctor": 0.0}
    for script in scripts:
        if time.perf_counter() - began > 60 * arguments.minutes:
            break
        before = children_s()
        rows.append(ask_traincheck(arguments.traincheck, script["script"], limit_s=arguments.limit))
        between = children_s()
        of_doctor.append(ask_doctor(script["script"], script["lines"]))
        used_s["traincheck"] += between - before
        used_s["doctor"] += children_s() - between
        shown = {
            key: len(value) if isinstance(value, frozenset) else value
            for key, value in rows[-1].items()
        }
        print(shown, of_doctor[-1], file=sys.stderr, flush=True)
    where = {"cpu": cpu_model(), "commit": commit()}
    failed = {row["script"]: row["error"] for row in rows if "error" in row}
    record(
        {
            "contender": "traincheck", **count(rows), "could_not_run": failed,
            "processor_s": round(used_s["traincheck"]), **version_of(arguments.traincheck), **where,
        },
        __file__, keep=arguments.record,
    )  # fmt: skip
    record(
        {
            "contender": "flambeau doctor --learning", "asked": len(rows),
            "found": sum(one["named"] for one in of_doctor),
            "twins_accused": sum(one["accused"] for one in of_doctor),
            "processor_s": round(used_s["doctor"]), "torch": torch.__version__,
            "python": ".".join(map(str, sys.version_info[:3])), **where,
        },
        __file__, keep=arguments.record,
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
