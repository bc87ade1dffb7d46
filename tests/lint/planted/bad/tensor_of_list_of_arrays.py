# planted: line 10, torch.tensor of a list of arrays is very slow; np.stack first; since torch 1.x
import numpy as np
import torch

frames = [np.random.rand(84, 84).astype("float32") for _ in range(128)]


def to_batch(states):
    arrays = [np.asarray(s) for s in states]
    batch = torch.tensor([np.asarray(s) for s in states])
    print(len(arrays))
    return batch.unsqueeze(1)


print(to_batch(frames).shape)
