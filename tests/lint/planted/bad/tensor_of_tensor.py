# planted: line 8, torch.tensor(tensor) copies and warns; use clone().detach(); since torch 1.0
import torch


def make_targets(boxes, labels):
    boxes = torch.as_tensor(boxes, dtype=torch.float32)
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    copied = torch.tensor(areas)
    return {"boxes": boxes, "area": copied, "labels": torch.as_tensor(labels)}


print(make_targets([[0, 0, 2, 2]], [1]))
