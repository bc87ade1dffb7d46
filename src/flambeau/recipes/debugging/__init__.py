"""Recipes that find what went wrong in a training."""
