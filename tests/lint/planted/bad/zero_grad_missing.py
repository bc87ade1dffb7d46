# planted: line 15, no zero_grad in the loop: gradients add up; in all versions
import torch
import torch.nn as nn


def train(net, loader, epochs=5):
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    net.train()
    for epoch in range(epochs):
        for x, y in loader:
            out = net(x)
            loss = criterion(out, y)
            loss.backward()
            optimizer.step()
        print(epoch, loss.item())
