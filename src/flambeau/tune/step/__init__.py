"""What one training step costs on this machine: its parts, its memory, and what settings change."""
