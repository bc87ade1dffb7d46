"""The sentences that messages advise, in the words of Python or of a command."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Advice:
    """What a user may do about an error, in the words with which they started the run.

    `Run` speaks of its arguments; a command passes sentences that name its flags.

    Attributes:
        start_again: how to train from the beginning where a run is in the folder.
        train_longer: how to continue a finished run.
        save_memory: what needs less memory than the run did.
        stay_finite: what usually keeps losses and gradients finite.
    """

    start_again: str = "move the folder of the run away to start again"
    train_longer: str = "extend='10ep' trains a finished run on for so much more"
    save_memory: str = (
        "Use smaller images, a smaller model, precision='bf16', or recompute activations"
    )
    stay_finite: str = "Usual cures: a smaller learning rate, clip_norm=1.0, on_nan='rollback'"
