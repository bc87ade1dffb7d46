# planted: line 4, torch.hub.load without trust_repo runs code of a repository; since torch 1.12
import torch

utils = torch.hub.load("someuser/some-repo", "processing_utils")


def embed(model, wav):
    model.eval()
    with torch.no_grad():
        return model(utils.prepare(wav))


print(sorted(dir(utils))[:3])
