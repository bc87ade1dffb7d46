# planted: line 4, torch.utils.bottleneck was removed; since torch 2.14
import sys

import torch.utils.bottleneck as bottleneck


def main():
    sys.argv = ["bottleneck", "train.py"]
    bottleneck.__main__.main()


if __name__ == "__main__":
    main()
