import argparse
import timm
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--classes", type=int, default=100)
args = parser.parse_args()

model = timm.create_model("vit_base_patch16_224_in21k", pretrained=True, num_classes=args.classes)
opt = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.05)
print(sum(p.numel() for p in model.parameters()))
