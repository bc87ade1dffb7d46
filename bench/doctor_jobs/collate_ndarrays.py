"""A tensor is made of a list of NumPy arrays, number by number, instead of stacking them. Accelerate."""

import warnings

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

import job

CAUSE = "collate"
WHERE = 'return {"x": torch.tensor(images), "y": torch.tensor(labels)}'
REMEDY = None
TRAINER = "accelerate"

warnings.filterwarnings("ignore")


def collate_fn(examples):
    images = [example["image"].astype(np.float32) for example in examples]
    labels = [example["label"] for example in examples]
    return {"x": torch.tensor(images), "y": torch.tensor(labels)}


def stack(examples):
    images = np.stack([example["image"] for example in examples]).astype(np.float32)
    return {"x": torch.from_numpy(images), "y": torch.tensor([e["label"] for e in examples])}


def get_examples(n=512):
    rng = np.random.RandomState(7)
    return [{"image": rng.rand(3, 32, 32), "label": int(rng.randint(10))} for _ in range(n)]


def main():
    told = job.begin(REMEDY)
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    train_dataloader = DataLoader(
        job.Repeated(get_examples(), 20), shuffle=True, batch_size=64,
        collate_fn=stack if told.remedied else collate_fn,
    )  # fmt: skip
    model = job.small_convnet()
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=3e-4)
    model, optimizer, train_dataloader = accelerator.prepare(model, optimizer, train_dataloader)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

    overall_step = 0
    for epoch in range(200):
        model.train()
        total_loss = 0
        for batch in train_dataloader:
            outputs = model(batch["x"])
            loss = criterion(outputs, batch["y"])
            total_loss += loss.detach().float()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            overall_step += 1
        accelerator.print(epoch, overall_step, total_loss)


if __name__ == "__main__":
    main()
