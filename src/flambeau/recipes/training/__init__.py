"""What happens inside a training step: precision, clipping, losses, averages, schedules."""
