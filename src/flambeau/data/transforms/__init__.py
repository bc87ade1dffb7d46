"""Transforms of the pixels of one image: crops, color, automatic augmentation; pure functions of a seed."""
