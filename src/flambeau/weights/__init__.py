"""Weights in files of any kind: read without running them, summarized, written."""
