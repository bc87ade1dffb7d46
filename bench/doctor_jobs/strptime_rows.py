"""The time of each row of a CSV file is parsed when the row comes by. An IterableDataset with windows."""

import csv
import random
from collections import deque
from datetime import datetime, timedelta

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import job

CAUSE = ("transform", "decode")
WHERE = 'moment = datetime.strptime(row["time"], "%d.%m.%Y %H:%M:%S")'
REMEDY = None
TRAINER = "plain"
FILE = job.made(job.CACHE) / "meter.csv"


def write_meter(rows=20_000):
    moment = datetime(2025, 1, 1)
    level = 0.0
    with FILE.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["time", "kwh"])
        for _ in range(rows):
            moment += timedelta(minutes=15)
            level = 0.9 * level + random.gauss(0, 0.1)
            out.writerow([f"{moment:%d.%m.%Y %H:%M:%S}", f"{level:.4f}"])


class Windows(IterableDataset):
    """The last day as a window, and what comes next."""

    def __init__(self, iso):
        self.iso = iso

    def features(self, row):
        if self.iso:
            day, month, year = row["time"][:10].split(".")
            moment = datetime.fromisoformat(f"{year}-{month}-{day}T{row['time'][11:]}")
        else:
            moment = datetime.strptime(row["time"], "%d.%m.%Y %H:%M:%S")
        return [float(row["kwh"]), moment.hour / 24, moment.weekday() / 7]

    def __iter__(self):
        window = deque(maxlen=13)
        with FILE.open(newline="") as file:
            for number, row in enumerate(csv.DictReader(file)):
                window.append(self.features(row))
                if len(window) == 13 and number % 4 == 0:
                    *past, future = window
                    yield torch.tensor(past), future[0]


def main():
    told = job.begin(REMEDY)
    torch.set_num_threads(1)
    write_meter()
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters())
    for day in range(1000):
        seen, total = 0, 0.0
        for past, future in DataLoader(Windows(told.remedied), batch_size=64):
            optimizer.zero_grad()
            loss = (model(past)[:, 0] - future.float()).abs().mean()
            loss.backward()
            optimizer.step()
            seen += len(past)
            total += loss.item() * len(past)
        print(day, total / seen)


if __name__ == "__main__":
    main()
