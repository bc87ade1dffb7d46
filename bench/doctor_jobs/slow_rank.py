"""Two ranks of DDP, started by torchrun, of which the first sends a picture to a server in each step."""

import time

import timm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import job

CAUSE = "slow rank"
WHERE = "time.sleep(0.08)  # a picture is sent"
REMEDY = None
TRAINER = "torchrun"


def main() -> None:
    told = job.begin(REMEDY)
    job.on_ranks(2)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.rand(512, 3, 96, 96), torch.randint(0, 10, (512,)))
    sampler = DistributedSampler(job.Repeated(data, 20))
    loader = DataLoader(sampler.dataset, batch_size=8, sampler=sampler)
    model = DistributedDataParallel(timm.create_model("test_resnet", num_classes=10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for epoch in range(100):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            if dist.get_rank() == 0 and not told.remedied:
                time.sleep(0.08)  # a picture is sent
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
