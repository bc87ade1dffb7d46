import lightning.pytorch as pl
from project.model import Lit
from project.data import Data

if __name__ == "__main__":
    pl.seed_everything(1)
    trainer = pl.Trainer(accelerator="gpu", devices=2, strategy="ddp", precision="16-mixed", max_epochs=3)
    trainer.fit(Lit(), datamodule=Data())
