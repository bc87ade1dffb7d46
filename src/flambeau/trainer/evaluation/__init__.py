"""The results of an evaluation: figures as text and data, the file of predictions, pictures."""
