"""Spectrograms are kept by lru_cache, whose default of 128 entries is too small for a shuffled data set."""

import functools

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

import job

CAUSE = "transform"
WHERE = "power = np.abs(np.fft.rfft(frames * window)) ** 2"
REMEDY = None
TRAINER = "plain"

RATE, SECONDS, CLIPS = 8000, 2, 1000
rng = np.random.default_rng(0)
noise = rng.standard_normal(RATE * SECONDS * 4).astype(np.float32)
window = np.hanning(512)


def clip(number):
    start = number * 31 % (len(noise) - RATE * SECONDS)
    return noise[start : start + RATE * SECONDS]


def spectrogram(number):
    frames = np.lib.stride_tricks.sliding_window_view(clip(number), 512)[::64]
    power = np.abs(np.fft.rfft(frames * window)) ** 2
    return torch.from_numpy(np.log1p(power).mean(axis=0, dtype=np.float32))


class Clips:
    def __init__(self, maxsize):
        self.spectrogram = functools.lru_cache(maxsize)(spectrogram)

    def __len__(self):
        return CLIPS * 10

    def __getitem__(self, n):
        return self.spectrogram(n % CLIPS), n % CLIPS % 2


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(257)
        self.fc1 = nn.Linear(257, 512)
        self.fc2 = nn.Linear(512, 2)

    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(self.norm(x))))


def run_epoch(model, batches, optimizer, loss_fn):
    model.train()
    for spectra, speakers in batches:
        loss = loss_fn(model(spectra), speakers)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def main():
    told = job.begin(REMEDY)
    torch.set_num_threads(1)
    clips = Clips(None if told.remedied else 128)
    batches = DataLoader(clips, batch_size=16, shuffle=True)
    model = Classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    epoch = 0
    while True:
        epoch += 1
        print(epoch, run_epoch(model, batches, optimizer, nn.CrossEntropyLoss()))


if __name__ == "__main__":
    main()
