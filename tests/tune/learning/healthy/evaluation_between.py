"""Validate every twenty steps and go back into training mode; keep the best weights."""

import copy

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(16, 64)
        self.bn = nn.BatchNorm1d(64)
        self.dropout = nn.Dropout(0.3)
        self.fc2 = nn.Linear(64, 4)

    def forward(self, x):
        x = torch.relu(self.bn(self.fc1(x)))
        return self.fc2(self.dropout(x))


@torch.inference_mode()
def evaluate(model, x, y):
    was_training = model.training
    model.eval()
    loss = nn.functional.cross_entropy(model(x), y).item()
    model.train(was_training)
    return loss


def main():
    torch.manual_seed(0)
    rule = torch.randn(16, 4)
    x = torch.randn(3000, 16)
    y = (x @ rule).argmax(1)
    x_train, x_val = x[:2000], x[2000:]
    y_train, y_val = y[:2000], y[2000:]
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    best_loss = float("inf")
    best_weights = None
    for step in range(120):
        pick = torch.randint(2000, (64,))
        loss = nn.functional.cross_entropy(model(x_train[pick]), y_train[pick])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}")
        if step % 20 == 19:
            val_loss = evaluate(model, x_val, y_val)
            if val_loss < best_loss:
                best_loss = val_loss
                best_weights = copy.deepcopy(model.state_dict())
    model.load_state_dict(best_weights)
    print(f"best validation loss {best_loss:.4f}")


if __name__ == "__main__":
    main()
