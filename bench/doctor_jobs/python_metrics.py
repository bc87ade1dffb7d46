"""The area under the ROC curve, over all pairs of a batch, in Python, in each step."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import job

CAUSE = "python"
WHERE = "ordered = sum(low < high for low in negatives for high in positives)"
REMEDY = None
TRAINER = "plain"


def area_under_curve(scores: list[float], labels: list[float]) -> float:
    negatives = [score for score, label in zip(scores, labels, strict=True) if not label]
    positives = [score for score, label in zip(scores, labels, strict=True) if label]
    ordered = sum(low < high for low in negatives for high in positives)
    return ordered / (len(negatives) * len(positives))


def main() -> None:
    told = job.begin(REMEDY)
    x = torch.randn(10_240, 64)
    data = TensorDataset(x, (x[:, 0] + torch.randn(len(x)) > 0).float())
    loader = DataLoader(job.Repeated(data, 20), batch_size=1024, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1), nn.Flatten(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    area = 0.0
    for epoch in range(100):
        for inputs, labels in loader:
            scores = model(inputs)
            loss = F.binary_cross_entropy_with_logits(scores, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if not told.remedied:
                area = area_under_curve(scores.tolist(), labels.tolist())
        print(f"epoch {epoch}: loss {loss.item():.3f}, area {area:.3f}")


if __name__ == "__main__":
    main()
