# planted: line 8, Trainer(progress_bar_refresh_rate=) was removed; since Lightning 1.7
import pytorch_lightning as pl


def make_trainer(cfg):
    return pl.Trainer(
        max_steps=cfg.steps,
        progress_bar_refresh_rate=20,
        val_check_interval=0.5,
        log_every_n_steps=10,
    )
