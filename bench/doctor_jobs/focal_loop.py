"""The focal loss of a detector is added up anchor by anchor in a Python loop."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import job

CAUSE = ("small steps", "python")
WHERE = "total = total - weight * (1 - p).clamp(min=1e-6) ** self.gamma * p.log()"
REMEDY = None
TRAINER = "plain"


class FocalLoss(nn.Module):
    def __init__(self, gamma: float = 2.0, alpha: float = 0.25, vectorized: bool = False) -> None:
        super().__init__()
        self.gamma = gamma
        self.alpha = alpha
        self.vectorized = vectorized

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        probs = torch.where(targets > 0, logits.sigmoid(), (-logits).sigmoid())
        if self.vectorized:
            weights = torch.where(targets > 0, self.alpha, 1 - self.alpha)
            terms = weights * (1 - probs).clamp(min=1e-6) ** self.gamma * probs.log()
            return -terms.sum() / len(logits)
        total = logits.new_zeros(())
        labels = targets.flatten().tolist()
        for p, label in zip(probs.flatten().unbind(), labels, strict=True):
            weight = self.alpha if label > 0 else 1 - self.alpha
            total = total - weight * (1 - p).clamp(min=1e-6) ** self.gamma * p.log()
        return total / len(logits)


class Detector(nn.Module):
    def __init__(self, anchors: int = 48) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        )
        self.objectness = nn.Linear(64, anchors)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.objectness(self.backbone(images))


class Trainer:
    def __init__(self, model: nn.Module, criterion: nn.Module, loader: DataLoader) -> None:
        self.model, self.criterion, self.loader = model, criterion, loader
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, weight_decay=1e-4)

    def train_one_epoch(self) -> float:
        self.model.train()
        total = 0.0
        for images, targets in self.loader:
            loss = self.criterion(self.model(images), targets)
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            total += loss.item()
        return total / len(self.loader)


if __name__ == "__main__":
    told = job.begin(REMEDY)
    torch.set_num_threads(1)
    images = torch.randn(2000, 3, 64, 64)
    targets = (torch.rand(2000, 48) < 0.1).float()
    loader = DataLoader(TensorDataset(images, targets), batch_size=8, shuffle=True)
    trainer = Trainer(Detector(), FocalLoss(vectorized=told.remedied), loader)
    for epoch in range(100):
        print(f"Epoch {epoch}: loss {trainer.train_one_epoch():.4f}")
