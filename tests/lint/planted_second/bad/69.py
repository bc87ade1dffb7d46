import argparse
import torch
import yaml

def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--config", default="configs/base.yaml")
    args = p.parse_args()
    with open(args.config) as f:
        cfg = yaml.load(f, Loader=yaml.Loader)
    return cfg

cfg = parse()
torch.manual_seed(cfg["seed"])
