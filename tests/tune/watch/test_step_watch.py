"""Steps are counted, whichever optimizer makes them."""

import json
import time
from pathlib import Path

import torch
from torch import nn

from flambeau.tune.watch.loader_clock import LoaderClock
from flambeau.tune.watch.plan import Plan
from flambeau.tune.watch.step_watch import StepWatch


def an_optimizer() -> torch.optim.SGD:
    return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)


def test_the_optimizer_of_a_second_stage_goes_on_in_the_window(tmp_path: Path) -> None:
    plan = Plan(watches=False, warmup_steps=1, warmup_s=0.0, steps=6, seconds=0.5)
    watch = StepWatch(tmp_path, plan, LoaderClock(), lambda: None)
    first, other = an_optimizer(), an_optimizer()
    for _ in range(4):  # the first step, the one that opens the window, and two in it
        watch.on_step(first, (), {})
        watch.on_step(other, (), {})  # as a discriminator's: within a step of the first
    del first
    steps = 2
    while not (files := list(tmp_path.glob("[0-9]*[0-9].json"))):
        watch.on_step(other, (), {})
        steps += 1
        time.sleep(0.01)
    told = json.loads(files[0].read_text())
    assert told["steps"] == len(told["times"]) == steps
    assert steps > 6
