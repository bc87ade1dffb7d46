import argparse
import os

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", default=-1, type=int)  # here: FLB423
args = parser.parse_args()
os.environ["WORLD_SIZE"] = "2"
torch.distributed.init_process_group("nccl")
print(args.local_rank)
