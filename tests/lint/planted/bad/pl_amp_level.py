# planted: line 10, Trainer(amp_backend=, amp_level=) were removed; since Lightning 2.0
import pytorch_lightning as pl
from pytorch_lightning.loggers import TensorBoardLogger

logger = TensorBoardLogger("logs", name="gan")
trainer = pl.Trainer(
    accelerator="gpu",
    devices=1,
    precision=16,
    amp_backend="apex",
    logger=logger,
)
print(trainer.precision)
