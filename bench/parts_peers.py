"""What other trainers make of a change of the number of processes, beside steps in parts.

    python bench/parts_peers.py [--plans N] [--record]

A plan is a small training whose lives have another number of ranks (1 to 4, gloo), each ended by itself at a
checkpoint, which is the kindest end there is: nobody is killed. The global batch is 24 samples, nothing is
random, and each trainer resumes from its own full checkpoint. Its final weights are compared with those of
its own run on one process that nobody stopped.

`flambeau` is Run(parts=12). Plain DDP, Accelerate and Lightning get each rank's share of the same samples in
the same order by hand, which is more than their own resuming gives. One JSON line per contender: of how many
plans the weights are equal to the bit, and the largest difference. Peers run where they are installed
(`pip install -e '.[bench]'`).
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: ranks share few cores

import argparse
import importlib.util
import logging
import multiprocessing
import platform
import random
import socket
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._dynamo  # an optimizer imports it: once here, not in each rank
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from flambeau import Run
from provenance import commit, cpu_model, record  # beside this script

BATCH, STEPS, FEATURES = 24, 12, 16
SAMPLES = BATCH * STEPS


class Life(NamedTuple):
    """One start: ranks, and the step after which it ends."""

    world: int
    stop_at: int


def lives_of(plan: int) -> list[Life]:
    """Three lives, each with another number of ranks."""
    rng = random.Random(plan)
    worlds = rng.sample((1, 2, 3, 4), 3)
    ends = [*sorted(rng.sample(range(2, STEPS - 1), 2)), STEPS]
    return [Life(*both) for both in zip(worlds, ends, strict=True)]


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Rows of noise and their classes."""

    def __init__(self) -> None:
        self.rows = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.rows[index], (self.rows[index].sum() > 0).long()


def a_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(FEATURES, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 2)
    )  # fmt: skip


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def share(step: int, rank: int, world: int) -> tuple[Tensor, Tensor]:
    """This rank's samples of a step."""
    size, data = BATCH // world, Rows()
    first = step * BATCH + rank * size
    rows = [data[index] for index in range(first, first + size)]
    return torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows])


def ddp(folder: Path, life: Life, rank: int) -> None:
    """The loop of PyTorch's tutorial, with a checkpoint at the end of the life."""
    model = a_model()
    optimizer = adamw(model)
    wrapped = DistributedDataParallel(model) if life.world > 1 else model
    file, done = folder / "state.pt", 0
    if file.exists():
        saved = torch.load(file)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["step"]
    for step in range(done, life.stop_at):
        images, targets = share(step, rank, life.world)
        optimizer.zero_grad()
        cross_entropy(wrapped(images), targets).backward()
        optimizer.step()
    if rank == 0:
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "step": life.stop_at,
        }
        torch.save(state, file)


def accelerate(folder: Path, life: Life, rank: int) -> None:
    """Its own prepare, backward, save_state and load_state."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = a_model()
    prepared, optimizer = accelerator.prepare(model, adamw(model))
    done_file, done = folder / "done", 0
    if done_file.exists():
        accelerator.load_state(f"{folder}/state")
        done = int(done_file.read_text())
    for step in range(done, life.stop_at):
        images, targets = share(step, rank, life.world)
        optimizer.zero_grad()
        accelerator.backward(cross_entropy(prepared(images), targets))
        optimizer.step()
    accelerator.save_state(f"{folder}/state")
    if rank == 0:
        done_file.write_text(f"{life.stop_at}")
        torch.save({"model": accelerator.unwrap_model(prepared).state_dict()}, folder / "state.pt")


def lightning(folder: Path, life: Life, rank: int) -> None:
    """Its Trainer, which resumes from its own checkpoint."""
    import lightning as pl

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = a_model()

        def training_step(self, batch: Any, _: int) -> Tensor:
            images, targets = share(self.global_step, rank, life.world)
            return cross_entropy(self.model(images), targets)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(self.model)

    module = Module()
    trainer = pl.Trainer(
        accelerator="cpu", devices=life.world, strategy="ddp" if life.world > 1 else "auto",
        max_steps=life.stop_at, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, use_distributed_sampler=False,
    )  # fmt: skip
    steps = torch.utils.data.DataLoader(range(STEPS))  # type: ignore[arg-type]
    last = folder / "last.ckpt"
    trainer.fit(module, steps, ckpt_path=f"{last}" if last.exists() else None, weights_only=False)
    trainer.save_checkpoint(last)
    if rank == 0:
        torch.save({"model": module.model.state_dict()}, folder / "state.pt")


def flambeau(folder: Path, life: Life, rank: int) -> None:
    """Run, in twelve parts; its checkpoints are made every step."""
    model = a_model()
    run = Run(
        folder / "run", model, adamw(model), Rows(), duration=f"{STEPS}st", batch_size=BATCH, parts=12,
        checkpoint_every="1st", bar=False,
    )  # fmt: skip
    if run.state.step < life.stop_at:
        _train(run, model, life.stop_at)
    if rank == 0:
        torch.save({"model": model.state_dict()}, folder / "state.pt")


def _train(run: Run, model: nn.Module, stop_at: int) -> None:
    for _ in run.epochs():
        for images, targets in run.batches():
            run.step(cross_entropy(model(images), targets))
            if run.state.step == stop_at < STEPS:
                run.close()
                return


CONTENDERS: dict[str, Callable[[Path, Life, int], None]] = {
    "flambeau Run(parts=12)": flambeau, "DDP": ddp, "Accelerate": accelerate, "Lightning": lightning,
}  # fmt: skip


def rank_of(name: str, folder: Path, life: Life, rank: int, port: int) -> None:
    """The process of a rank."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(
        RANK=f"{rank}", LOCAL_RANK=f"{rank}", WORLD_SIZE=f"{life.world}", LOCAL_WORLD_SIZE=f"{life.world}",
        GROUP_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=f"{port}", TORCHELASTIC_RUN_ID="bench",
    )  # fmt: skip
    if name == "DDP" and life.world > 1:
        dist.init_process_group("gloo")
    CONTENDERS[name](folder, life, rank)
    if dist.is_initialized():
        dist.destroy_process_group()


def weights_after(name: str, lives: list[Life]) -> dict[str, Tensor]:
    """Of a training with these lives."""
    with tempfile.TemporaryDirectory() as place:
        for life in lives:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            ranks = [
                multiprocessing.get_context("fork").Process(
                    target=rank_of, args=(name, Path(place), life, rank, port)
                )
                for rank in range(life.world)
            ]
            for process in ranks:
                process.start()
            for process in ranks:
                process.join()
            if codes := [p.exitcode for p in ranks if p.exitcode]:
                raise RuntimeError(f"{name} on {life.world} ranks: exit codes {codes}")
        return torch.load(Path(place) / "state.pt")["model"]  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--plans", type=int, default=10)
    parser.add_argument("--record", action="store_true", help="append to bench/results")
    options = parser.parse_args()
    for name in CONTENDERS:
        package = name.split()[0].lower()
        if name != "DDP" and importlib.util.find_spec(package) is None:
            print(f"{name} is not installed")
            continue
        expected = weights_after(name, [Life(1, STEPS)])
        differences = []
        for plan in range(options.plans):
            found = weights_after(name, lives_of(plan))
            differences.append(max(float((found[k] - expected[k]).abs().max()) for k in expected))
        row = {
            "contender": name, "plans": options.plans,
            "equal_to_the_bit": sum(not difference for difference in differences),
            "largest_difference": max(differences), "steps": STEPS, "torch": torch.__version__,
            "python": platform.python_version(), "cpu": cpu_model(), "commit": commit(),
        }  # fmt: skip
        record(row, __file__, keep=options.record)


if __name__ == "__main__":
    main()
