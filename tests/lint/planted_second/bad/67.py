import argparse
import pickle
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--features", required=True)
args = parser.parse_args()

with open(args.features, "rb") as f:
    data = pickle.load(f)
x = torch.as_tensor(data["x"])
print(x.shape)
