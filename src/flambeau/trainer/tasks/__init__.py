"""What a training is for: the task owns targets, loss, figures, outputs and predictions."""
