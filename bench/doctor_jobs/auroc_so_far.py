"""The exact area under the ROC curve of everything so far is shown after each step, by torchmetrics."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC
from tqdm import tqdm

import job

CAUSE = ("python", "evaluation")
WHERE = 'shown = {name: f"{value:.3f}" for name, value in metrics.compute().items()}'
REMEDY = None
TRAINER = "plain"


def main():
    told = job.begin(REMEDY)
    torch.set_num_threads(1)
    torch.manual_seed(0)

    x = torch.randn(12_800, 30)
    y = (x[:, :3].sum(1) + torch.randn(12_800) > 0).long()
    train_loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)

    model = nn.Sequential(nn.Linear(30, 200), nn.ReLU(), nn.Dropout(), nn.Linear(200, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loss_fn = nn.BCEWithLogitsLoss()
    metrics = MetricCollection([BinaryAccuracy(), BinaryAUROC()])
    metrics.update(torch.rand(6400), torch.randint(0, 2, (6400,)))  # of the run that goes on here

    for epoch in range(300):
        with tqdm(train_loader, desc=f"Epoch {epoch}", mininterval=5) as progress:
            for step, (inputs, targets) in enumerate(progress):
                scores = model(inputs).squeeze(1)
                loss = loss_fn(scores, targets.float())

                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

                metrics.update(scores.detach(), targets)
                if not told.remedied or step % 100 == 0:
                    shown = {name: f"{value:.3f}" for name, value in metrics.compute().items()}
                    progress.set_postfix(shown, refresh=False)
        metrics.reset()
        metrics.update(torch.rand(6400), torch.randint(0, 2, (6400,)))


if __name__ == "__main__":
    main()
