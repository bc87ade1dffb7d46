"""A confusion matrix that is counted pixel by pixel, with item(), in each step."""

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

import job

CAUSE = ("sync", "python")
WHERE = "confusion[truth[i].item()][guesses[i].item()] += 1"
REMEDY = None
TRAINER = "plain"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 4, 3, padding=1)

    def forward(self, x):
        return self.conv2(F.relu(self.conv1(x)))


def main():
    told = job.begin(REMEDY)
    device = torch.device("cpu")
    model = Net().to(device)
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    train_set = TensorDataset(torch.rand(2000, 3, 16, 16), torch.randint(0, 4, (2000, 16, 16)))
    train_loader = DataLoader(train_set, batch_size=8, shuffle=True)
    for epoch in range(1, 500):
        model.train()
        confusion = [[0] * 4 for _ in range(4)]
        for images, labels in train_loader:
            optimizer.zero_grad()
            output = model(images.to(device))
            loss = F.cross_entropy(output, labels)
            loss.backward()
            optimizer.step()
            guesses, truth = output.argmax(1).flatten(), labels.flatten()
            if told.remedied:
                continue
            for i in range(len(truth)):
                confusion[truth[i].item()][guesses[i].item()] += 1
        print(f"Train Epoch: {epoch}\tLoss: {loss.item():.6f}", sum(map(sum, confusion)))


if __name__ == "__main__":
    main()
