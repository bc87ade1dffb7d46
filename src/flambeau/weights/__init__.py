"""Weights in files of any kind: read without running code in them, summarized, written."""
