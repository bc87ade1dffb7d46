"""Boxes, classes, areas and flags of each image are tensors of their own, all of which two workers send."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import job

CAUSE = "send"
WHERE = None
REMEDY = "workers=0"
TRAINER = "plain"


class Traffic(Dataset):
    """Images and targets as torchvision's reference for detection has them."""

    def __init__(self, num_images=4000):
        self.num_images = num_images
        self.image = torch.rand(3, 24, 24)

    def __len__(self):
        return self.num_images

    def __getitem__(self, idx):
        boxes = torch.tensor([[2.0, 2.0, 9.0, 9.0], [4.0, 3.0, 20.0, 14.0]])
        target = {
            "boxes": boxes,
            "labels": torch.tensor([1, idx % 3]),
            "image_id": torch.tensor([idx]),
            "area": torch.tensor([49.0, 176.0]),
            "iscrowd": torch.zeros(2, dtype=torch.int64),
        }
        return self.image * (idx % 7), target


def collate_fn(batch):
    return tuple(zip(*batch, strict=True))


def train_one_epoch(model, optimizer, data_loader, epoch, print_freq):
    model.train()
    for step, (images, targets) in enumerate(data_loader):
        found = model(torch.stack(images))
        boxes = torch.stack([target["boxes"].mean(dim=0) for target in targets]) / 24
        loss = nn.functional.smooth_l1_loss(found, boxes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % print_freq == 0:
            print(f"Epoch: [{epoch}] [{step}/{len(data_loader)}] loss: {loss.item():.4f}")


def main():
    told = job.begin(REMEDY)
    torch.set_num_threads(1)
    data_loader = DataLoader(
        Traffic(),
        batch_size=32,
        shuffle=True,
        num_workers=0 if told.remedied else 2,
        persistent_workers=not told.remedied,
        collate_fn=collate_fn,
    )
    model = nn.Sequential(nn.Conv2d(3, 8, 5, stride=3), nn.ReLU(), nn.Flatten(), nn.Linear(392, 4))
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(params, lr=0.005, momentum=0.9, weight_decay=0.0005)
    for epoch in range(100):
        train_one_epoch(model, optimizer, data_loader, epoch, print_freq=50)


if __name__ == "__main__":
    main()
