"""Labelled images that are stored as arrays, and readers for the arrays of each format."""
