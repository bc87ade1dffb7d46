"""Runs inside a watched process: what a training learns from, and what comes of it."""
