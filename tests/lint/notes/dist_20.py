# python -m torch.distributed.launch --nproc_per_node=8 train.py
import argparse

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=0)  # here: FLB423
args = parser.parse_args()
torch.cuda.set_device(args.local_rank)
torch.distributed.init_process_group("nccl", init_method="env://")
