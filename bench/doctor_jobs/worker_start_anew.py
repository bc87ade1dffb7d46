"""A loader with spawned workers is made anew for each epoch of 20 steps, whose images have another size."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import job

CAUSE = "worker start"
WHERE = None
REMEDY = None
TRAINER = "plain"

EPOCH, BATCH = 160, 8


class Noise(Dataset):
    def __init__(self, side):
        self.side = side

    def __len__(self):
        return EPOCH

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, self.side, self.side, generator=generator), index % 10


def get_loader(side, keep=False):
    return DataLoader(
        Noise(side),
        batch_size=BATCH,
        shuffle=True,
        num_workers=2,
        multiprocessing_context="spawn",
        persistent_workers=keep,
    )


def main():
    told = job.begin(REMEDY, every=EPOCH // BATCH)
    torch.set_num_threads(1)
    model = job.small_convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss_fn = nn.CrossEntropyLoss()
    kept = {side: get_loader(side, keep=True) for side in (64, 96)} if told.remedied else {}
    for epoch in range(1000):
        side = 64 if epoch % 2 else 96
        loader = kept[side] if told.remedied else get_loader(side)
        for x, y in loader:
            loss = loss_fn(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(epoch, side, loss.item())


if __name__ == "__main__":
    main()
