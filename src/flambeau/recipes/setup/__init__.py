"""Seeding, determinism and the report of the environment."""
