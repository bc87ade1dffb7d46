# planted: line 9, Trainer(gpus=) was removed; use accelerator= and devices=; since Lightning 2.0
import pytorch_lightning as pl

from mymodel import LitClassifier

if __name__ == "__main__":
    pl.seed_everything(1234)
    model = LitClassifier()
    trainer = pl.Trainer(gpus=2, max_epochs=20, strategy="ddp")
    trainer.fit(model)
    trainer.test(model)
