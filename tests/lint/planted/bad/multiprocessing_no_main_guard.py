# planted: line 12, DataLoader workers started at module level with spawn, without a __main__ guard; in all versions
import torch
import torch.multiprocessing as mp

model = torch.nn.Linear(2, 2)


def worker(rank):
    print(rank, model.weight.sum())


mp.spawn(worker, nprocs=2)
