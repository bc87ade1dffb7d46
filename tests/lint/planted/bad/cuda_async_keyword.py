# planted: line 9, .cuda(async=True) is a SyntaxError since Python 3.7; use non_blocking=True; since torch 0.4, Python 3.7
import torch
import torch.nn as nn

criterion = nn.CrossEntropyLoss().cuda()


def step(model, optimizer, input, target):
    target = target.cuda(async=True)
    output = model(input)
    loss = criterion(output, target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()
