"""Photographs of 2000 x 1500 pixels, of which small crops are shrunk to 96: timm's loader and optimizer."""

import timm.data
import timm.optim
import torch
import torch.nn.functional as F

import job
from flambeau.data.fast import fast

CAUSE = "decode"
WHERE = None
REMEDY = "fast(loader)"
TRAINER = "timm"


def main() -> None:
    told = job.begin(REMEDY)
    torch.set_num_threads(1)  # the cores are for the workers
    folder = job.photos(2000, 1500, 200)
    loader = timm.data.create_loader(
        timm.data.create_dataset("", root=f"{folder}"),
        input_size=(3, 96, 96),
        batch_size=8,
        is_training=True,
        scale=(0.02, 0.06),
        num_workers=2,
        device=torch.device("cpu"),
    )
    if told.remedied:
        loader = fast(loader)
    model = job.small_convnet()
    optimizer = timm.optim.create_optimizer_v2(model, opt="sgd", lr=0.01, momentum=0.9)
    for epoch in range(1000):
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
