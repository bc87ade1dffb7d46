# planted: line 9, on_epoch_end / on_pretrain_routine_start hooks were removed; since Lightning 2.0 (1.8)
import pytorch_lightning as pl


class PrintCallback(pl.Callback):
    def on_train_start(self, trainer, pl_module):
        print("starting")

    def on_batch_end(self, trainer, pl_module):
        print(trainer.global_step)

    def on_train_end(self, trainer, pl_module):
        print("done")
