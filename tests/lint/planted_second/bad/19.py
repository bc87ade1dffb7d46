from argparse import ArgumentParser
import pytorch_lightning as pl

from project.model import LitClassifier
from project.data import CifarData

def main():
    parser = ArgumentParser()
    parser.add_argument("--epochs", type=int, default=30)
    args = parser.parse_args()
    pl.seed_everything(42)
    model = LitClassifier()
    trainer = pl.Trainer(gpus=2, max_epochs=args.epochs)
    trainer.fit(model, datamodule=CifarData())

if __name__ == "__main__":
    main()
