import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


@torch.no_grad()
def validate(model, dataset):
    model.eval()
    sampler = DistributedSampler(dataset, shuffle=False)
    loader = DataLoader(dataset, batch_size=64, sampler=sampler)
    return [model(x) for x in loader]
