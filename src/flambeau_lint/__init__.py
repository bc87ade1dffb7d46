"""Old PyTorch code made new: what a newer torch has removed, deprecated or changed, and what is wrong.

Standard library only, Python 3.9 or later: it runs where torch is not installed.
"""
