"""torch's anomaly mode, left on since a search for NaN. accelerate."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import job

CAUSE = "debug mode"
WHERE = None
REMEDY = "no anomaly mode"
TRAINER = "accelerate"


def main() -> None:
    told = job.begin(REMEDY)
    torch.autograd.set_detect_anomaly(not told.remedied)
    data = TensorDataset(torch.randn(2000, 16, 64), torch.randint(0, 10, (2000,)))
    loader = DataLoader(job.Repeated(data, 20), batch_size=4, shuffle=True)
    layers = [
        nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True) for _ in range(8)
    ]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(100):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
        accelerator.print(f"epoch {epoch}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
