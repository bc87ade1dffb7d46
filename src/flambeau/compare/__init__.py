"""Compares two runs, to the first step, module and tensor in which they differ."""
