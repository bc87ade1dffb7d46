import copy
import torch

def fit(model, train_one_epoch, evaluate, epochs):
    best, best_wts = 0.0, None
    for _ in range(epochs):
        train_one_epoch(model)
        acc = evaluate(model)
        if acc > best:
            best = acc
            best_wts = copy.deepcopy(model.state_dict())
    model.load_state_dict(best_wts)
    torch.save(best_wts, "best.pt")
    return model
