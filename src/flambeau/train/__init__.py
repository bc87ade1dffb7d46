"""A training run: its settings, parts, loop and folder. May import recipes, data and parallel."""
