"""What a training waits for, and what makes it faster: `flambeau doctor`, for any script."""
