"""Conversions, distances and checks of tensors."""
