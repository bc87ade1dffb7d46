"""Truncated backpropagation through time: the state is detached between the pieces."""

import torch
from torch import nn

torch.manual_seed(0)
PIECE = 16
time = torch.arange(0, 4000)
wave = torch.sin(0.3 * time) + 0.5 * torch.sin(0.11 * time)
streams = wave[:3840].view(8, 480)

rnn = nn.LSTM(1, 24, batch_first=True)
readout = nn.Linear(24, 1)
parameters = list(rnn.parameters()) + list(readout.parameters())
optimizer = torch.optim.Adam(parameters, lr=1e-2)

step = 0
for epoch in range(4):
    state = None
    for begin in range(0, 480 - PIECE - 1, PIECE):
        x = streams[:, begin : begin + PIECE, None]
        y = streams[:, begin + 1 : begin + PIECE + 1, None]
        hidden, state = rnn(x, state)
        state = tuple(part.detach() for part in state)
        loss = nn.functional.mse_loss(readout(hidden), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}")
        step += 1
