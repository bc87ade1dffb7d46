# planted: line 13, Trainer.add_argparse_args / from_argparse_args were removed; since Lightning 2.0
from argparse import ArgumentParser

import pytorch_lightning as pl

from project import LitModel

parser = ArgumentParser()
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--max_epochs", type=int, default=10)
args = parser.parse_args()

trainer = pl.Trainer.from_argparse_args(args)
trainer.fit(LitModel(args.lr))
