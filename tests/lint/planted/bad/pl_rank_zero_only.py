# planted: line 5, pytorch_lightning.utilities.distributed was removed; use utilities.rank_zero; since Lightning 1.8/2.0
import os

import pytorch_lightning as pl
from pytorch_lightning.utilities.distributed import rank_zero_only


class SaveSamples(pl.Callback):
    @rank_zero_only
    def on_train_epoch_end(self, trainer, pl_module):
        os.makedirs("samples", exist_ok=True)
        with open("samples/%d.txt" % trainer.current_epoch, "w") as f:
            f.write("done")
