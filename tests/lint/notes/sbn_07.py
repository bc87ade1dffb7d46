import apex
from apex import amp  # here: FLB177
from apex.parallel import DistributedDataParallel as DDP  # here: FLB178


def wrap(model, optimizer):
    model = apex.parallel.convert_syncbn_model(model)  # here: FLB178
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
    return DDP(model, delay_allreduce=True), optimizer
