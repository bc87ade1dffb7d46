# planted: line 6, torch.cuda.FloatTensor(...) constructor: uninitialised when given a size, and legacy; since torch 0.4
import torch


def gradient_penalty(critic, real, fake):
    alpha = torch.cuda.FloatTensor(real.size(0), 1, 1, 1).uniform_()
    mixed = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    score = critic(mixed)
    grad = torch.autograd.grad(score.sum(), mixed, create_graph=True)[0]
    return ((grad.flatten(1).norm(2, dim=1) - 1) ** 2).mean()
