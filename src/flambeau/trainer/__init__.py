"""What `flambeau train` adds to `Run`: settings, data and model, the loop, evaluation, prediction."""
