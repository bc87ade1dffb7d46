from dataclasses import dataclass, field

import torch


@dataclass
class Batch:
    data: torch.Tensor
    labels: list[int] = field(default_factory=list)


def centre(batch: Batch) -> Batch:
    batch.data -= batch.data.mean()
    return batch


print(centre(Batch(torch.rand(4))).data.sum())
