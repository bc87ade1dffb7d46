import torch.distributed as dist
import torch.multiprocessing as mp


def work(gpu, args):
    dist.init_process_group(backend="nccl")  # here: FLB459
    print(gpu, args)


if __name__ == "__main__":
    mp.spawn(work, args=({},), nprocs=2)
