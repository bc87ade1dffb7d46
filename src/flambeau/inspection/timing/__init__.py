"""What a training step costs on this machine: its parts, its operations, and what settings change."""
