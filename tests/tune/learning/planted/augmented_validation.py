"""Train on augmented images, validate on the rest; prints the validation loss."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, random_split


class Images(Dataset):
    def __init__(self, images, labels, augment):
        self.images = images
        self.labels = labels
        self.augment = augment

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.images[index]
        if self.augment:
            top, left = torch.randint(5, (2,)).tolist()
            image = nn.functional.pad(image, (2, 2, 2, 2))[:, top : top + 10, left : left + 10]
            image = image + 0.8 * torch.randn_like(image)
        return image, self.labels[index]


torch.manual_seed(0)
labels = torch.randint(4, (1600,))
images = torch.randn(4, 1, 10, 10)[labels] + 0.5 * torch.randn(1600, 1, 10, 10)
whole = Images(images, labels, augment=True)
train_set, val_set = random_split(whole, [1400, 200])
train_loader = DataLoader(train_set, batch_size=50, shuffle=True)
val_loader = DataLoader(Subset(val_set, range(100)), batch_size=100)

model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(512, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
step = 0
for _ in range(3):
    for x, y in train_loader:
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            with torch.no_grad():
                losses = [nn.functional.cross_entropy(model(a), b) for a, b in val_loader]
            print(f"step {step} loss {torch.stack(losses).mean().item():.4f}")
        step += 1
