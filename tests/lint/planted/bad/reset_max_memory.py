# planted: line 7, torch.cuda.reset_max_memory_allocated is deprecated; use reset_peak_memory_stats; since torch 1.4
import torch


def peak_memory(fn, *args):
    torch.cuda.synchronize()
    torch.cuda.reset_max_memory_allocated()
    fn(*args)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 2**20


print("%.1f MiB" % peak_memory(lambda: torch.ones(1024, 1024, device="cuda")))
