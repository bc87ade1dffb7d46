"""What `flambeau env` and `flambeau gpus` ask this machine: its disk, its driver, the wheels that fit it."""
