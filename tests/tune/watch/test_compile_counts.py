"""What torch.compile has made in this process, beside graphs and breaks that the test has made itself."""

import subprocess
import sys

import torch

from flambeau.tune.watch.step_watch import compile_counts


def _broken(values: torch.Tensor) -> torch.Tensor:
    twice = values * 2
    torch._dynamo.graph_break()
    return twice + 1


def test_graphs_and_their_breaks_are_counted() -> None:
    torch._dynamo.reset()
    graphs, breaks = compile_counts()
    torch.compile(_broken, backend="eager")(torch.ones(3))
    after, breaks_after = compile_counts()
    assert after - graphs == 2
    assert sum(breaks_after.values()) - sum(breaks.values()) == 1
    (reason,) = [name for name in breaks_after if breaks_after[name] > breaks.get(name, 0)]
    assert "graph_break" in reason
    assert "\n" not in reason


def test_a_process_without_torch_compile_imports_nothing_for_it() -> None:
    code = (
        "import sys; from flambeau.tune.watch.step_watch import compile_counts; "
        "print(compile_counts(), 'torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "(0, {}) False"
