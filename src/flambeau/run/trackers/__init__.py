"""Experiment trackers: what follows metrics.jsonl of a run in threads, and shows or keeps its curves."""
