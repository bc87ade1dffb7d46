"""A training by flambeau.Run, which clears the gradients and steps itself."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from flambeau import Run


def make_data(num):
    generator = torch.Generator().manual_seed(num)
    points = 2 * torch.rand(num, 2, generator=generator) - 1
    return TensorDataset(points, (points.norm(dim=1) < 0.8).long())


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    run = Run("runs/circle", model, optimizer, make_data(1920), duration="3ep", batch_size=64)
    test = make_data(500)
    step = 0
    for _ in run.epochs():
        for inputs, targets in run.batches():
            with run.autocast():
                loss = cross_entropy(model(inputs), targets)
            run.step(loss)
            if step % 5 == 0:
                print(f"step {step} loss {loss.item():.4f}")
            step += 1
        for inputs, targets in run.evaluate(test):
            logits = model(inputs)
            losses = cross_entropy(logits, targets, reduction="none")
            run.log(val_loss=losses, val_accuracy=logits.argmax(1) == targets)


if __name__ == "__main__":
    main()
