import torch
from torch import nn


class WindowReader:
    """Cuts windows out of a long recording without allocating."""

    def __init__(self, recording, length):
        self.recording = recording
        self.length = length
        self.buffer = torch.empty(length)

    def read(self, start):
        self.buffer.copy_(self.recording[start : start + self.length])
        return self.buffer


def make_recording(n):
    state = torch.zeros(n, dtype=torch.long)
    state[n // 2 :] = 1
    state = state[torch.arange(n) // 50 * 50 * 7919 % n]
    noise = torch.randn(n)
    t = torch.arange(n).float()
    return torch.where(state == 1, torch.sin(t * 0.9), torch.sin(t * 0.3)) + 0.3 * noise, state


def collect(reader, state, size):
    starts = torch.randint(len(state) // 50 - 1, (size,)) * 50
    windows = [reader.read(s) for s in starts.tolist()]
    return torch.stack(windows), state[starts]


def main():
    torch.manual_seed(0)
    recording, state = make_recording(20000)
    reader = WindowReader(recording, 50)
    model = nn.Sequential(nn.Linear(50, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(80):
        x, y = collect(reader, state, 32)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f}")


main()
