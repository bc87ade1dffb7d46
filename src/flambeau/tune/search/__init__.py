"""Finds the settings with which a training runs fastest, or in least memory: `flambeau tune`."""
