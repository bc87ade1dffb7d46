import torch

def masked_loss(loss, target, ignore=-1):
    ignored = target == ignore
    keep = 1 - ignored
    return (loss * keep.float()).sum() / keep.float().sum().clamp(min=1)

print(masked_loss(torch.rand(4), torch.tensor([0, 1, -1, 2])))
