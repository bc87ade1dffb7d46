# planted: line 14, cross_entropy of softmax outputs; in all versions
import torch
import torch.nn.functional as F


class Learner:
    def __init__(self, model, optimizer):
        self.model = model
        self.optimizer = optimizer

    def step(self, images, labels):
        logits = self.model(images)
        probs = torch.softmax(logits, dim=-1)
        loss = F.cross_entropy(probs, labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()
