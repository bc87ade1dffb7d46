"""What needs CUDA: NCCL on one GPU, and DDP's reducer there."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from flambeau.data.loading.micro_batch import MicroBatch
from flambeau.parallel.gradient_sync.ddp import Replicas
from flambeau.parallel.ranks import Ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


@pytest.mark.parametrize("compression", ["none", "fp16", "bf16"])
def test_replicas_reduce_by_nccl(compression: str) -> None:
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2))
        model = model.to("cuda", memory_format=torch.channels_last)
        alone = copy.deepcopy(model)
        replicas = Replicas(model, Ranks(0, 1, dist.group.WORLD), compression=compression)
        for step in range(3):
            images = torch.randn(4, 3, 3, 3, device="cuda")
            micro = MicroBatch(
                data=None, indices=None, size=4, total=4, part=1, ends_batch=True, ends_epoch=False,
                position=4, bad=(), all_have=True, draw=step,
            )  # fmt: skip
            replicas.before_batch(micro)
            for net in (model, alone):
                net(images).square().mean().backward()
            replicas.after_backward()
            exact = (
                {"rtol": 1e-5, "atol": 1e-6}
                if compression == "none"
                else {"rtol": 0.02, "atol": 0.01}
            )
            for p, q in zip(model.parameters(), alone.parameters(), strict=True):
                assert p.grad is not None
                assert p.grad.stride() == p.stride()
                torch.testing.assert_close(p.grad, q.grad, **exact)
                p.grad = q.grad = None
    finally:
        dist.destroy_process_group()
