# planted: line 9, --local_rank argument: the launcher passes --local-rank since 2.0; read os.environ['LOCAL_RANK']; since torch 2.0
import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=0)
args = parser.parse_args()

torch.cuda.set_device(args.local_rank)
dist.init_process_group("nccl")
model = DDP(torch.nn.Linear(8, 8).cuda(), device_ids=[args.local_rank])
