"""An engine with events, whose handler collects garbage after every 10 iterations while many objects live."""

import gc
from collections import defaultdict
from enum import Enum

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import job

CAUSE = "python"
WHERE = "gc.collect()"
REMEDY = None
TRAINER = "plain"


class Events(Enum):
    EPOCH_STARTED = "epoch_started"
    ITERATION_COMPLETED = "iteration_completed"
    EPOCH_COMPLETED = "epoch_completed"


class Engine:
    def __init__(self, process):
        self.process = process
        self.handlers = defaultdict(list)
        self.epoch = 0
        self.iteration = 0
        self.output = None

    def on(self, event):
        def register(handler):
            self.handlers[event].append(handler)
            return handler

        return register

    def fire(self, event):
        for handler in self.handlers[event]:
            handler(self)

    def run(self, loader, max_epochs):
        for self.epoch in range(max_epochs):
            self.fire(Events.EPOCH_STARTED)
            for batch in loader:
                self.output = self.process(batch)
                self.iteration += 1
                self.fire(Events.ITERATION_COMPLETED)
            self.fire(Events.EPOCH_COMPLETED)


class Boxes(Dataset):
    """With annotations as COCO has them: a dict for each box."""

    def __init__(self, count=10_000):
        self.boxes = torch.rand(count, 4).tolist()
        self.annotations = [
            {"id": n, "bbox": box, "category": {"id": n % 3}} for n, box in enumerate(self.boxes)
        ]

    def __len__(self):
        return len(self.annotations)

    def __getitem__(self, index):
        annotation = self.annotations[index]
        return torch.tensor(annotation["bbox"]), annotation["category"]["id"]


def main():
    told = job.begin(REMEDY, every=10)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(4, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU())
    model.append(nn.Linear(256, 3))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)

    def process(batch):
        x, y = batch
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    engine = Engine(process)

    if not told.remedied:

        @engine.on(Events.ITERATION_COMPLETED)
        def free_memory(engine):
            if engine.iteration % 10 == 0:
                gc.collect()

    @engine.on(Events.EPOCH_COMPLETED)
    def tell(engine):
        print(engine.epoch, engine.output)

    engine.run(DataLoader(Boxes(), batch_size=128, shuffle=True), max_epochs=100)


if __name__ == "__main__":
    main()
