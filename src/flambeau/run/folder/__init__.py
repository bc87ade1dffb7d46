"""The run folder: checkpoints, metrics.jsonl, published weights, and the identity of the run."""
