"""A thread per rank that names ranks that were killed or have stalled, and agrees on where all stop."""
