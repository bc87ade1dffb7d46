"""One label in five is wrong, so the loss ends well above zero."""

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class NoisyClusters(Dataset):
    def __init__(self, num, num_classes=8, noise=0.2, seed=0):
        rng = np.random.default_rng(seed)
        centers = rng.normal(size=(num_classes, 20))
        label = rng.integers(num_classes, size=num)
        self.x = (centers[label] + 0.5 * rng.normal(size=(num, 20))).astype("float32")
        wrong = rng.random(num) < noise
        self.y = np.where(wrong, rng.integers(num_classes, size=num), label)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        return torch.from_numpy(self.x[index]), int(self.y[index])


def main():
    torch.manual_seed(0)
    loader = DataLoader(NoisyClusters(2560), batch_size=64, shuffle=True, drop_last=True)
    model = torch.nn.Sequential(
        torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(64, 8)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-4)
    step = 0
    for _ in range(3):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 5 == 0:
                print(f"step {step} loss {loss.item():.4f}")
            step += 1


main()
