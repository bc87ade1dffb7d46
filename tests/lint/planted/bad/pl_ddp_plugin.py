# planted: line 3, pytorch_lightning.plugins.DDPPlugin was removed; use strategies.DDPStrategy; since Lightning 1.8
import pytorch_lightning as pl
from pytorch_lightning.plugins import DDPPlugin

from net import LitNet


def main():
    trainer = pl.Trainer(
        accelerator="gpu",
        devices=4,
        strategy=DDPPlugin(find_unused_parameters=False),
    )
    trainer.fit(LitNet())


if __name__ == "__main__":
    main()
