"""The rows of a patient are found by comparing the column of names as a whole, for each sample."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import job

CAUSE = ("transform", "few workers")
WHERE = 'visits = self.visits[self.visits["patient"] == patient]'
REMEDY = None
TRAINER = "plain"


@dataclass
class Config:
    patients: int = 1500
    visits: int = 8
    signals: tuple[str, ...] = ("pulse", "pressure", "oxygen", "glucose")
    batch_size: int = 32
    hidden: int = 48


def synthetic(config: Config) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    names = [f"patient-{number:05}" for number in range(config.patients)]
    table = pd.DataFrame({"patient": pd.Series(names * config.visits, dtype=object)})
    for signal in config.signals:
        table[signal] = rng.standard_normal(len(table)).astype(np.float32)
    return table


class Visits(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, visits: pd.DataFrame, config: Config, *, grouped: bool) -> None:
        self.visits, self.signals = visits, list(config.signals)
        self.patients = list(visits["patient"].unique())
        groups = visits.groupby("patient") if grouped else ()
        self.groups = {patient: rows[self.signals].to_numpy() for patient, rows in groups}

    def __len__(self) -> int:
        return len(self.patients)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        patient = self.patients[index]
        if self.groups:
            values = self.groups[patient]
        else:
            visits = self.visits[self.visits["patient"] == patient]
            values = visits[self.signals].to_numpy()
        return torch.tensor(values[:-1]), torch.tensor(values[-1])


class Forecaster(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.encoder = nn.GRU(len(config.signals), config.hidden, batch_first=True)
        self.decoder = nn.Linear(config.hidden, len(config.signals))

    def forward(self, x: Tensor) -> Tensor:
        _, state = self.encoder(x)
        return self.decoder(state[-1])


def main(config: Config) -> None:
    told = job.begin(REMEDY)
    torch.set_num_threads(1)
    data = Visits(synthetic(config), config, grouped=told.remedied)
    loader = DataLoader(data, config.batch_size, shuffle=True)
    model = Forecaster(config)
    optimizer = torch.optim.NAdam(model.parameters())
    for epoch in range(500):
        total = 0.0
        for past, future in loader:
            loss = nn.functional.huber_loss(model(past), future)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach().item()
        print(f"{epoch=} {total / len(loader):.3f}")


if __name__ == "__main__":
    main(Config())
