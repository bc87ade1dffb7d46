"""flambeau: train image classifiers, keep your own loop exact, take any recipe away as one file."""

__version__ = "0.1.0"
