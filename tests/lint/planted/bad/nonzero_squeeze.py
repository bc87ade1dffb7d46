# planted: line 6, nonzero().squeeze() loses its dimension where there is one hit; in all versions
import torch


def keep_boxes(boxes, scores, threshold=0.5):
    keep = torch.nonzero(scores > threshold).squeeze()
    boxes = boxes[keep]
    scores = scores[keep]
    order = scores.argsort(descending=True)
    return boxes[order], scores[order]
