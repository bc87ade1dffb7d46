"""The parts of the training loop: the step, its metrics and schedule, batches, checks, saved state."""
