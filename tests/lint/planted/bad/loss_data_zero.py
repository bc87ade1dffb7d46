# planted: line 17, loss.data[0] fails: a 0-dim tensor has no index; use loss.item(); since torch 0.5
from __future__ import print_function

import torch.nn.functional as F


def train(epoch, model, optimizer, train_loader, log_interval=10):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.cuda(), target.cuda()
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        if batch_idx % log_interval == 0:
            print("Train Epoch: {} Loss: {:.6f}".format(epoch, loss.data[0]))
