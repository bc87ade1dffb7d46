"""Advice in error messages, in the words of Python or of a command."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Advice:
    """What a user can do about an error, in the words of how the run was started.

    `Run` speaks of its arguments; a command passes sentences with its flags.
    """

    start_again: str = "move the folder of the run away to start again"
    train_longer: str = "extend='10ep' trains a finished run on for so much more"
    save_memory: str = (
        "Use smaller images, a smaller model, precision='bf16', or recompute activations"
    )
    stay_finite: str = "Usual cures: a smaller learning rate, clip_norm=1.0, on_nan='rollback'"
