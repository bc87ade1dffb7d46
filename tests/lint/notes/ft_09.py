import torch


def optimizer_for(model, finetuned, conv):
    return torch.optim.SGD(
        [
            {"parameters": finetuned, "lr": 0.01},  # here: FLB402
            {"parameters": conv, "lr": 0.001},  # here: FLB402
        ],
        lr=0.01,
    )
