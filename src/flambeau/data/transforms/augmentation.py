"""The augmentations of a sample that the settings choose, besides crop and flip."""

from dataclasses import dataclass

from flambeau.data.images.decode import Pixels
from flambeau.data.transforms.auto_augment import rand_augment, trivial_augment_wide
from flambeau.data.transforms.color import color_jitter


@dataclass(frozen=True)
class Augmentation:
    """Colour jitter, then a policy of random operations; a function of the pixels and the sample's seed.

    Args:
        policy: 'none', 'randaugment' or 'trivialaugment', with torchvision's default magnitudes.
        jitter: brightness, contrast and saturation are changed by up to this factor, each by itself.
    """

    policy: str = "none"
    jitter: float = 0.0

    def __call__(self, pixels: Pixels, seed: int) -> Pixels:
        """(H, W, C) uint8 to the same; only the low 64 bits of the seed count."""
        if self.jitter:
            pixels = color_jitter(
                pixels, seed, brightness=self.jitter, contrast=self.jitter, saturation=self.jitter
            )
        if self.policy == "randaugment":
            return rand_augment(pixels, seed)
        return trivial_augment_wide(pixels, seed) if self.policy == "trivialaugment" else pixels

    def __bool__(self) -> bool:
        return self.policy != "none" or self.jitter > 0
