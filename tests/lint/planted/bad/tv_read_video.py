# planted: line 7, torchvision.io.read_video is deprecated / removed; use TorchCodec; since torchvision 0.22
import torch
from torchvision.io import read_video


def clip(path, seconds=2):
    frames, _, info = read_video(path, pts_unit="sec", end_pts=seconds)
    frames = frames.permute(0, 3, 1, 2).float() / 255
    return torch.nn.functional.interpolate(frames, size=(112, 112)), info


print(clip("a.mp4")[0].shape)
