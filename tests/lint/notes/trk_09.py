import torch.nn.functional as F


def train(net, optimizer, loader):
    losses = 0
    for i, (images, labels) in enumerate(loader):
        losses = losses + F.cross_entropy(net(images), labels)  # here: left, that it is meant to save memory is not in the file
        if (i + 1) % 2 == 0:
            optimizer.zero_grad()
            losses.backward()  # here: FLB419 preview
            optimizer.step()
            losses = 0


def train_by_parts(net, optimizer, loader):
    for i, (images, labels) in enumerate(loader):
        loss = F.cross_entropy(net(images), labels)
        loss.backward()  # here: FLB419 preview
        if (i + 1) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
