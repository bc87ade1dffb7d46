"""A folder for PYTHONPATH: Python runs its `sitecustomize.py` before any script."""
