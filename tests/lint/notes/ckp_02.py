import torch


def save(model, optimizer, epoch, best_acc, path):
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": epoch,
        "best_acc": best_acc,  # here: left, the type of the number is not in the file
    }
    torch.save(state, path)
