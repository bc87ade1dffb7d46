# planted: line 3, torch.utils.serialization.load_lua was removed; since torch 1.0
import torch
from torch.utils.serialization import load_lua


def load_vgg(path, net):
    old = load_lua(path)
    for dst, src in zip(net.parameters(), old.parameters()[0]):
        dst.data[:] = src[:]
    torch.save(net.state_dict(), path.replace(".t7", ".pth"))
