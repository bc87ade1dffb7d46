"""A thread of the script's own waits for news in a loop without a pause, and takes the interpreter's lock."""

import sys
import threading

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import job

CAUSE = "python"
WHERE = ("while self.last_told == self.step:", "pass  # nothing new yet")
REMEDY = None
TRAINER = "plain"


class Progress(threading.Thread):
    """Tells every 500 steps how far the training is."""

    def __init__(self, polls: bool) -> None:
        super().__init__(daemon=True)
        self.polls = polls
        self.step = self.last_told = 0
        self.is_new = threading.Event()

    def tick(self) -> None:
        self.step += 1
        if self.step % 500 == 0:
            self.is_new.set()

    def wait(self) -> None:
        if not self.polls:
            self.is_new.wait()
            self.is_new.clear()
            return
        while self.last_told == self.step:
            pass  # nothing new yet

    def run(self) -> None:
        while True:
            self.wait()
            self.last_told = self.step
            if self.step % 500 == 0:
                print("step", self.step, file=sys.stderr)


def fit(net, loader, progress, epochs=1000):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, nesterov=True, momentum=0.9)
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
            progress.tick()


if __name__ == "__main__":
    told = job.begin(REMEDY)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.randn(8192, 32)
    progress = Progress(polls=not told.remedied)
    progress.start()
    layers = [nn.Sequential(nn.Linear(32, 32), nn.SiLU()) for _ in range(6)]
    loader = DataLoader(TensorDataset(x, x.roll(1, 1)), batch_size=64, shuffle=True)
    fit(nn.Sequential(*layers), loader, progress)
