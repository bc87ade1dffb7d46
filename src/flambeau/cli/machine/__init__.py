"""What `flambeau env` and `flambeau gpus` measure of this machine: its disk and its driver."""
