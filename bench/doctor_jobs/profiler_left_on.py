"""torch.profiler, left on, which writes a trace of each 10 steps."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import profile, schedule
from torch.utils.data import DataLoader, TensorDataset

import job

CAUSE = "debug mode"
WHERE = None
REMEDY = None
TRAINER = "plain"


def write(profiler: profile) -> None:
    profiler.export_chrome_trace(f"{job.CACHE / 'trace.json'}")


def main() -> None:
    told = job.begin(REMEDY, every=10)
    data = TensorDataset(torch.randn(2000, 32, 64), torch.randint(0, 10, (2000,)))
    loader = DataLoader(job.Repeated(data, 20), batch_size=8, shuffle=True)
    layers = [
        nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True) for _ in range(4)
    ]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    profiler = profile(
        schedule=schedule(wait=0, warmup=1, active=9),
        on_trace_ready=write,
        record_shapes=True,
        with_stack=True,
    )
    if not told.remedied:
        profiler.start()
    for epoch in range(100):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if not told.remedied:
                profiler.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
