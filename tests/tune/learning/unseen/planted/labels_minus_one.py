import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

NUM_CLASSES = 6
IGNORE = -1


def load_table(n):
    labels = torch.randint(NUM_CLASSES, (n,))
    means = torch.linspace(-3, 3, NUM_CLASSES)
    rows = torch.randn(n, 10) * 0.6
    rows[:, 0] += means[labels]
    rows[:, 1] += means[(labels * 5 + 2) % NUM_CLASSES]
    return rows, labels


def to_zero_based(labels):
    # the labels of the file count from one
    return labels - 1


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(10)
        self.fc1 = nn.Linear(10, 64)
        self.fc2 = nn.Linear(64, NUM_CLASSES)

    def forward(self, x):
        return self.fc2(F.relu(self.fc1(self.norm(x))))


def main():
    torch.manual_seed(2)
    rows, labels = load_table(1600)
    loader = DataLoader(TensorDataset(rows, to_zero_based(labels)), batch_size=40, shuffle=True)
    model = Classifier()
    criterion = nn.CrossEntropyLoss(ignore_index=IGNORE)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    step = 0
    for _epoch in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            print(f"step {step} loss {loss.item():.4f}")
            step += 1


main()
