"""A small training that saves in one of many ways, for bench/faults/ways_of_saving.py.

    python saving_job.py prepare WAY[,WAY ...]     (makes the files that a user of these ways has)
    python saving_job.py train WAY[,WAY ...]       (trains for ever, or for SAVING_STEPS steps)

It writes into the working directory, below $HOME and $TMPDIR, and into the folders $SAVING_OUTSIDE and
$SAVING_VAR. After each save it reads back what it wrote: where a save reaches nothing, the training fails.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

sys.path.insert(0, str(Path(__file__).parent))

import saving_files
import saving_libraries
import saving_processes
import saving_runs

EVERY = 5  # steps between two saves
PAUSE_S = 0.003  # of a step

Save = Callable[[int], None]


@dataclass(frozen=True)
class Way:
    """One way of saving.

    Attributes:
        start: called at the start of the script; gives what saves, which takes the number of the step.
        files: of the user, made before.
        prepare: makes what is no file of bytes; called after those were made.
        needs: packages.
        launch: words before the script in the command: torchrun and its flags.
        dataset: makes the data of the training, for ways that write there.
    """

    start: Callable[[nn.Module], Save]
    files: tuple[str, ...] = ()
    prepare: Callable[[], None] = lambda: None
    needs: tuple[str, ...] = ()
    launch: tuple[str, ...] = ()
    dataset: Callable[[], Dataset[tuple[torch.Tensor, torch.Tensor]]] | None = None


def ways() -> dict[str, Way]:
    """All of them by name."""
    found: dict[str, Way] = {}
    for module in (saving_files, saving_libraries, saving_processes, saving_runs):
        for name, arguments in module.WAYS.items():
            assert name not in found, name
            found[name] = Way(**arguments)
    return found


def way_of(names: str) -> Way:
    """A way, or several at once that have nothing to do with each other: WAY,WAY."""
    known = [ways()[name] for name in names.split(",")]
    if len(known) == 1:
        return known[0]
    assert not any(one.launch or one.dataset for one in known), names

    def start(model: nn.Module) -> Save:
        saves = [one.start(model) for one in known]

        def save(step: int) -> None:
            for one in saves:
                one(step)

        return save

    def prepare() -> None:
        for one in known:
            one.prepare()

    return Way(
        start,
        files=tuple(file for one in known for file in one.files),
        prepare=prepare,
        needs=tuple(package for one in known for package in one.needs),
    )


def model_of() -> nn.Module:
    """The same small one in each way."""
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))


def batches(way: Way) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Epoch after epoch."""
    if way.dataset is None:
        loader = DataLoader(
            TensorDataset(torch.randn(640, 32), torch.randint(4, (640,))), 16, shuffle=True
        )
    else:
        loader = DataLoader(
            way.dataset(),
            16,
            num_workers=2,
            multiprocessing_context="spawn",
            persistent_workers=True,
        )
    while True:
        yield from loader


def train(way: Way) -> None:
    """The loop; the first save comes before the first step, so that no trial is too short for one."""
    torch.manual_seed(int(time.time() * 1000) % 2**31)  # no two trials write the same
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    save = way.start(model)
    last = int(os.environ.get("SAVING_STEPS", "1000000000"))
    save(0)
    for step, (x, y) in enumerate(batches(way), 1):
        time.sleep(PAUSE_S)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % EVERY == 0:
            save(step)
        if step == last:
            return


def prepare(way: Way) -> None:
    """Files of the user, as an earlier training or the user has left them."""
    for name in way.files:
        path = Path(os.path.expandvars(name)).expanduser()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(f"the user's own {path.name}\n".encode() * 40)
    way.prepare()


def main() -> None:
    verb, names = sys.argv[1:3]
    {"prepare": prepare, "train": train}[verb](way_of(names))


if __name__ == "__main__":
    main()
