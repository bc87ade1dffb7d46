from apex.parallel import DistributedDataParallel as DDP  # here: FLB178


def wrap(model):
    return DDP(model, delay_allreduce=True)
