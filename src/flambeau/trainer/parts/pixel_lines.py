"""What a training says about the bits and channels of its images before it starts."""

from collections.abc import Sequence

from flambeau.data.sources.source import Source, pixel_kind
from flambeau.data.sources.wide_source import COLORS, headers
from flambeau.data.transforms.auto_augment import NEED_WHITE, SHAPES
from flambeau.images.channels import shown_text
from flambeau.trainer.parts.data import DataFacts, moves_only
from flambeau.trainer.settings.resolved_settings import ResolvedSettings

_MOST_SHOWN = 8  # numbers in a line, for the eye


def pixel_lines(
    facts: DataFacts, settings: ResolvedSettings, train: Source, *, is_asked: bool
) -> list[str]:
    """Lines on levels and channels that are kept, converted or unknown.

    `is_asked`: the user chose channels or bits.
    """
    lines = [*_kept(facts, settings)]
    if settings.augment != "none" and moves_only(facts):
        lines.append(
            f"{settings.augment} of {', '.join(SHAPES[1:])} alone, which move pixels: what is white, or a "
            "color, is not known of these"
        )
    if settings.pretrained and facts.channels != 3:
        lines.append(adapted_line(settings.model, facts.channels))
    if facts.pixels == "uint8" and facts.channels in COLORS and not is_asked:
        lines += _converted(train)
    return lines


def adapted_line(model: str, channels: int) -> str:
    """What becomes of the first layer of published weights for images of other channels than three."""
    how = "summed up" if channels == 1 else "repeated and rescaled"
    return (
        f"the first layer of {model}, published for 3 channels, is adapted to {channels}: its weights are "
        f"{how}"
    )


def _kept(facts: DataFacts, settings: ResolvedSettings) -> list[str]:
    is_wide = facts.pixels == "uint16"
    is_stacked = facts.channels not in COLORS
    if not is_wide and not is_stacked:
        return []
    what = " and ".join(
        [f"{facts.channels} channels"] * is_stacked + ["16 bits, with all their levels"] * is_wide
    )
    lines = [f"images of {what}: mean {_few(facts.mean)}, standard deviation {_few(facts.std)}"]
    if is_stacked:
        lines.append(f"pictures in the report show {shown_text(facts.channels)}")
    if is_wide and settings.augment != "none" and not is_stacked:
        lines.append(
            f"{settings.augment} without {', '.join(NEED_WHITE)}: which of the 16 bits are used, and so "
            "the level of white, is unknown"
        )
    return lines


def _converted(train: Source) -> list[str]:
    """Lines on images that become color of 8 bits."""
    if pixel_kind(train) != "uint8":
        return []
    looked = [*headers(train, is_asked=False).values()]
    num_wide = sum(found.is_wide for found in looked)
    num_alpha = sum(found.may_be_alpha for found in looked)
    lines = []
    if num_wide:
        lines.append(
            f"{num_wide} of {len(looked)} images looked at have 16 bits and are read as 8, like the others; "
            "where all have 16, all levels are kept (--bits 16 refuses others)"
        )
    if num_alpha:
        lines.append(
            f"{num_alpha} of {len(looked)} images looked at are arrays of 4 channels, read as color with "
            "transparent parts over white; --channels 4 keeps all four"
        )
    return lines


def _few(numbers: Sequence[float]) -> str:
    if len(numbers) <= _MOST_SHOWN:
        return str([*numbers])
    return f"{min(numbers):g} .. {max(numbers):g}"
