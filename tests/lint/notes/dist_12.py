import argparse
import os

import torch.distributed as dist
import torch.multiprocessing as mp


def train(gpu, args):
    dist.init_process_group("nccl", init_method="env://", world_size=args.world_size)  # here: FLB459
    print(gpu)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("-n", "--nodes", default=1, type=int)
    parser.add_argument("-g", "--gpus", default=1, type=int)
    parser.add_argument("-nr", "--nr", default=0, type=int)
    args = parser.parse_args()
    args.world_size = args.gpus * args.nodes
    os.environ["MASTER_ADDR"] = "192.0.2.1"
    os.environ["MASTER_PORT"] = "8888"
    mp.spawn(train, nprocs=args.gpus, args=(args,))


if __name__ == "__main__":
    main()
