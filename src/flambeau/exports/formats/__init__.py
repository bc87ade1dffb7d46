"""The files that an exported model can be: each written, opened and asked."""
