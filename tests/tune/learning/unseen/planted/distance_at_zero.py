import torch
from torch import nn


class Embedder(nn.Module):
    def __init__(self, inputs=10, d=6):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, d))

    def forward(self, x):
        return self.f(x)


def pairwise(a):
    squared = (a.unsqueeze(0) - a.unsqueeze(1)).pow(2).sum(-1)
    return squared.sqrt()


def hardest_triplet_loss(embeddings, labels, margin=1.0):
    distance = pairwise(embeddings)
    same = labels[:, None] == labels[None, :]
    farthest = (distance * same).amax(dim=1)
    nearest = (distance + 1e6 * same).amin(dim=1)
    return torch.relu(farthest - nearest + margin).mean()


def identities(n, people=8):
    centers = torch.randn(people, 10, generator=torch.Generator().manual_seed(4)) * 2
    labels = torch.randint(people, (n,))
    return centers[labels] + 0.4 * torch.randn(n, 10), labels


def main():
    torch.manual_seed(0)
    model = Embedder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(70):
        x, labels = identities(32)
        loss = hardest_triplet_loss(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f}")


main()
