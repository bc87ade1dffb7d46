"""Activation checkpointing, memory estimates and budgets, and in-place operations that are proven safe."""
