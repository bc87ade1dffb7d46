"""What `flambeau doctor` has found, as one HTML file that needs nothing else."""

from flambeau.report.markup import escaped, table
from flambeau.report.page import page_head
from flambeau.tune.doctor.formatting import percent
from flambeau.tune.doctor.remedy_trials import Tried
from flambeau.tune.doctor.run_doctor import Diagnosis
from flambeau.tune.doctor.shares import PHASES, shares_of


def page_of(found: Diagnosis, command: str) -> str:
    """The page.

    Args:
        found: what to show.
        command: that was watched, as the user typed it.
    """
    trial = found.findings.trial
    ranks = [f"rank {one['rank']}" for one in trial.trainers]
    each = [shares_of(one) for one in trial.trainers]
    shown = [phase for phase in PHASES if any(shares[phase] >= 0.005 for shares in each)]
    sections = [
        table(
            ["of a step", *ranks],
            [(phase, *(percent(shares[phase]) for shares in each)) for phase in shown],
            numbers=len(ranks),
            caption="Where the time of a step goes",
        ),
        table(
            ["cause", "what", "share"],
            [(cause.kind, cause.text, percent(cause.share)) for cause in found.causes],
            numbers=1,
            caption="Causes, the first one first",
        ),
    ]
    if found.tried:
        rows = [_row(one) for one in found.tried]
        heads = ["change", "how", "verdict", "predicted", "measured"]
        sections.append(table(heads, rows, numbers=2, caption="Changes that were tried"))
    steps = (
        f"{trial.trainers[0]['steps']} steps of {1000 * trial.step_s:.3g} ms, torch "
        f"{trial.trainers[0]['torch']}, {trial.trainers[0]['device']}"
    )
    said = "".join(f"<p>{escaped(line)}</p>" for line in [steps, *found.notes])
    parts = "".join(f"<section>{section}</section>" for section in sections)
    return f"""<!DOCTYPE html>
<html lang="en">
{page_head(f"doctor: {command}", [])}
<body>
<header><h1>{escaped(found.verdict)}</h1><p><code>{escaped(command)}</code></p>{said}</header>
<main>{parts}</main>
</body>
</html>
"""


def _row(one: Tried) -> tuple[str, str, str, str, str]:
    told = f"{'at most ' * one.remedy.at_most}{one.remedy.predicted:.2f}x"
    if one.gain is None:
        return one.remedy.name, one.remedy.how, one.failure.partition("\n")[0], told, "-"
    return one.remedy.name, one.remedy.how, one.gain.verdict, told, f"{one.gain.times:.2f}x"
