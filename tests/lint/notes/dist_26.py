from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def train(dataset, epochs, step):
    sampler = DistributedSampler(dataset)  # here: FLB406 preview
    loader = DataLoader(dataset, batch_size=32, sampler=sampler)
    for epoch in range(epochs):
        for batch in loader:
            step(batch)
        print(epoch)
