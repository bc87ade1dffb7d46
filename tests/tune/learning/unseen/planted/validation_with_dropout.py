import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class Trainer:
    def __init__(self, model, train_set, val_set, lr=2e-3):
        self.model = model
        self.train_loader = DataLoader(train_set, batch_size=32, shuffle=True)
        self.val_loader = DataLoader(val_set, batch_size=64)
        self.optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        self.global_step = 0

    def fit(self, epochs):
        for epoch in range(epochs):
            self.model.train()
            for x, y in self.train_loader:
                loss = self.loss(x, y)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                print(f"step {self.global_step} loss {loss.item():.4f}")
                self.global_step += 1
            print(f"epoch {epoch} val {self.evaluate():.4f}")

    def loss(self, x, y):
        return nn.functional.mse_loss(self.model(x).squeeze(-1), y)

    @torch.no_grad()
    def evaluate(self):
        total = 0.0
        count = 0
        for x, y in self.val_loader:
            total += self.loss(x, y).item() * len(x)
            count += len(x)
        return total / count


def main():
    torch.manual_seed(0)
    x = torch.randn(600, 10)
    y = x[:, 0] + torch.sin(2 * x[:, 1])
    train_set, val_set = random_split(TensorDataset(x, y), [480, 120])
    model = nn.Sequential(
        nn.Linear(10, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.4), nn.Linear(64, 1)
    )
    Trainer(model, train_set, val_set).fit(5)


main()
