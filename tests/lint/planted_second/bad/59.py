import torch

def fit(model, train_one_epoch, evaluate, epochs):
    best_acc = 0.0
    best_wts = None
    for epoch in range(epochs):
        train_one_epoch(model)
        acc = evaluate(model)
        if acc > best_acc:
            best_acc = acc
            best_wts = model.state_dict()
    model.load_state_dict(best_wts)
    torch.save(best_wts, "best.pt")
    return model
