# planted: line 7, integer tensor / int gives floats: used as an index it fails; since torch 1.5
import torch


def unravel(flat, width):
    index = torch.argmax(flat)
    row = index / width
    col = index % width
    grid = flat.view(-1, width)
    return grid[row, col]


print(unravel(torch.rand(12), 4))
