"""A trainer class around a sequential classifier."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Trainer:
    def __init__(self, model, loader, lr):
        self.model = model
        self.loader = loader
        self.criterion = nn.CrossEntropyLoss()
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        self.step = 0

    def train_epoch(self):
        self.model.train()
        for inputs, targets in self.loader:
            outputs = self.model(inputs)
            loss = self.criterion(outputs, targets)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            if self.step % 5 == 0:
                print(f"step {self.step} loss {loss.item():.4f}")
            self.step += 1


def main():
    torch.manual_seed(1)
    x = torch.randn(640, 20)
    y = (x @ torch.randn(20, 5)).argmax(1)
    model = nn.Sequential(
        nn.Linear(20, 64),
        nn.ReLU(),
        nn.Linear(64, 5),
        nn.Softmax(dim=-1),
    )
    trainer = Trainer(model, DataLoader(TensorDataset(x, y), 32, shuffle=True), 0.05)
    for _ in range(4):
        trainer.train_epoch()


main()
