import argparse
import torch
import yaml

parser = argparse.ArgumentParser()
parser.add_argument("--config", default="base.yaml")
args = parser.parse_args()
with open(args.config) as f:
    cfg = yaml.safe_load(f)
torch.manual_seed(cfg.get("seed", 0))
