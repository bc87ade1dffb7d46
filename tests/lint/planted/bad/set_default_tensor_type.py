# planted: line 11, torch.set_default_tensor_type is deprecated; since torch 2.1
import argparse

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--cuda", default=True, type=bool)
args = parser.parse_args()

if torch.cuda.is_available() and args.cuda:
    torch.set_default_tensor_type("torch.cuda.FloatTensor")

priors = torch.ones(8732, 4)
print(priors.device)
