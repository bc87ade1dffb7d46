# planted: line 9, torch.cuda.memory_cached was renamed to memory_reserved; since torch 1.4
import torch

device = torch.device("cuda:0")


def report(tag):
    used = torch.cuda.memory_allocated(device) / 1024**3
    cached = torch.cuda.memory_cached(device) / 1024**3
    print("%s allocated %.2f GB cached %.2f GB" % (tag, used, cached))


report("start")
x = torch.zeros(1024, 1024, 64, device=device)
report("after")
