# planted: line 14, Trainer(resume_from_checkpoint=) was removed; use fit(ckpt_path=); since Lightning 2.0
from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import ModelCheckpoint

from data import Data
from model import Model


def main(args):
    callback = ModelCheckpoint(dirpath="ckpt", monitor="val_loss")
    trainer = Trainer(
        max_epochs=args.epochs,
        callbacks=[callback],
        resume_from_checkpoint=args.resume,
    )
    trainer.fit(Model(args), datamodule=Data(args))
