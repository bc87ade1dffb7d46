"""Processes of one training: how they start, meet, agree, share work and end. May import recipes and data."""
