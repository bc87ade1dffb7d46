import torch
from torch.utils.data import DataLoader, DistributedSampler


class Data:
    def __init__(self, dataset):
        self.sampler = DistributedSampler(dataset)
        self.loader = DataLoader(dataset, batch_size=8, sampler=self.sampler)

    def start(self, epoch):
        self.sampler.set_epoch(epoch)
        return self.loader


def run(data, model, epochs):
    for epoch in range(epochs):
        for x in data.start(epoch):
            model(x)
