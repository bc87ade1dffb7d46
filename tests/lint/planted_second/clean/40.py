import argparse
import os
import torch
import torch.distributed as dist

def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--resume", default="")
    p.add_argument("--epochs", type=int, default=10)
    return p.parse_args()

def main():
    args = parse()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
    if args.resume:
        state = torch.load(args.resume, map_location=f"cuda:{local_rank}")
        print(state["epoch"])
    dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
