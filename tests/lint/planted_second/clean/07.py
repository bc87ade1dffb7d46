import os
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

def main(dataset, model, epochs):
    dist.init_process_group("nccl")
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    model = DDP(model.cuda(), device_ids=[rank])
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, 64, sampler=sampler, num_workers=4, pin_memory=True)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            opt.zero_grad()
            F.cross_entropy(model(x.cuda()), y.cuda()).backward()
            opt.step()
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), "ckpt.pt")
    dist.destroy_process_group()
