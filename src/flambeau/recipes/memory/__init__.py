"""Activation checkpointing, memory estimates and budgets, in-place operations with proof."""
