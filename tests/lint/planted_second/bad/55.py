import torch
import torch.nn as nn

def train(model, data, targets, hidden, args):
    opt = torch.optim.SGD(model.parameters(), lr=args.lr)
    criterion = nn.CrossEntropyLoss()
    model.train()
    for x, y in zip(data, targets):
        opt.zero_grad()
        out, _ = model(x, hidden)
        loss = criterion(out.view(-1, args.ntokens), y)
        loss.backward()
        opt.step()
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
