import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class TagDataset(Dataset):
    """Texts as counts of words; each of six tags depends on a few words."""

    def __init__(self, n, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.counts = torch.poisson(torch.full((n, 40), 0.7), generator=g)
        rules = torch.randn(40, 6, generator=torch.Generator().manual_seed(99))
        scores = self.counts @ rules
        self.tags = (scores > scores.median(0).values).float()

    def __len__(self):
        return len(self.counts)

    def __getitem__(self, i):
        return self.counts[i], self.tags[i]


class BaseTagger(nn.Module):
    def __init__(self, words, tags):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(words, 64), nn.ReLU(), nn.Dropout(0.1))
        self.out = nn.Linear(64, tags)

    def forward(self, counts):
        return self.out(self.body(counts))


class ProbabilityTagger(BaseTagger):
    def forward(self, counts):
        return torch.sigmoid(super().forward(counts))


class Trainer:
    def __init__(self, model, loader, lr):
        self.model = model
        self.loader = loader
        self.criterion = nn.BCEWithLogitsLoss(pos_weight=torch.ones(6))
        self.optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        self.step = 0

    def fit(self, epochs):
        for _ in range(epochs):
            self.model.train()
            for counts, tags in self.loader:
                self.training_step(counts, tags)

    def training_step(self, counts, tags):
        self.optimizer.zero_grad()
        loss = self.criterion(self.model(counts), tags)
        loss.backward()
        self.optimizer.step()
        print(f"step {self.step} loss {loss.item():.4f}")
        self.step += 1


torch.manual_seed(0)
Trainer(ProbabilityTagger(40, 6), DataLoader(TagDataset(1024), 32, shuffle=True), 3e-3).fit(3)
