import torch
import torch.nn.functional as F

def tbptt(model, batches, opt, hidden):
    model.train()
    for x, y in batches:
        hidden = tuple(h.detach() for h in hidden)
        opt.zero_grad()
        out, hidden = model(x, hidden)
        loss = F.cross_entropy(out.flatten(0, 1), y.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        opt.step()
    return hidden
