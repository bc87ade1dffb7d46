"""Runs inside the watched processes: clocks, stacks, and one change at a time."""
