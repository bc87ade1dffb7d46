"""Settings, the run, the loop and the checkpoints of a run. May import recipes and data."""
