"""Runs a script in trials, reads what the watched processes tell, and says what to change."""
