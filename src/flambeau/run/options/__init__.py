"""The options of a run, each declared once: type, default, range and one line in two languages."""
