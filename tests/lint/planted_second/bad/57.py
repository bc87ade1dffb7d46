import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

def main(model, loader, sampler, train_one_epoch):
    dist.init_process_group("nccl")
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    model = DDP(model.cuda(), device_ids=[rank])
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(20):
        sampler.set_epoch(epoch)
        train_one_epoch(model, loader, opt)
        torch.save(model.module.state_dict(), "ckpt.pt")
    dist.destroy_process_group()
