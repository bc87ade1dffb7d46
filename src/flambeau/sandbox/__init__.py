"""Runs a user's code without harm: in a view of the file system that is thrown away."""
