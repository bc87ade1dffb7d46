"""Spectrograms are held compressed in memory and inflated item by item, in the main process."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import job

CAUSE = "decode"
WHERE = "return zlib.decompress(self.blobs[index])"
REMEDY = None
TRAINER = "plain"

SHAPE: Final[tuple[int, int]] = (512, 256)
NUM_CLASSES: Final = 6
Spectrogram: TypeAlias = npt.NDArray[np.int16]


class Sample(NamedTuple):
    features: torch.Tensor
    label: int


@dataclass
class SpectrogramStore(Dataset[Sample]):
    blobs: list[bytes] = field(default_factory=list)
    whole: list[bytes] = field(default_factory=list)
    keeps_whole: bool = False

    def add(self, spectrogram: Spectrogram) -> None:
        raw = spectrogram.tobytes()
        if self.keeps_whole:
            self.whole.append(raw)
        self.blobs.append(zlib.compress(raw, 9))

    def __len__(self) -> int:
        return len(self.blobs)

    def __getitem__(self, index: int) -> Sample:
        raw = self.whole[index] if self.keeps_whole else self.inflated(index)
        values = np.frombuffer(raw, np.int16).reshape(SHAPE)
        return Sample(torch.from_numpy(values[::8, ::8].astype(np.float32)), index % NUM_CLASSES)

    def inflated(self, index: int) -> bytes:
        return zlib.decompress(self.blobs[index])


def make_store(keeps_whole: bool, count: int = 48) -> SpectrogramStore:
    store = SpectrogramStore(keeps_whole=keeps_whole)
    generator = np.random.default_rng(7)
    for _ in range(count):
        store.add(generator.integers(-30, 30, SHAPE).astype(np.int16))
    return store


def train(loader: DataLoader[Sample], model: nn.Module, epochs: int) -> float:
    criterion: nn.Module = nn.CrossEntropyLoss()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    last: float = float("nan")
    for _ in range(epochs):
        for features, label in loader:
            loss: torch.Tensor = criterion(model(features), label)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            last = float(loss)
    return last


def main() -> None:
    told = job.begin(REMEDY)
    torch.set_num_threads(1)
    store = job.Repeated(make_store(told.remedied), 40)
    loader: DataLoader[Sample] = DataLoader(store, batch_size=16, shuffle=True, drop_last=True)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64 * 32, 128), nn.GELU(), nn.Linear(128, 6))
    print(train(loader, model, epochs=1000))


if __name__ == "__main__":
    main()
