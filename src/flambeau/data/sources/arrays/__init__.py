"""Labelled images that are stored as arrays, and how the arrays of each format are read."""
