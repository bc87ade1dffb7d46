"""What a model is made of and what it costs: its modules, its operations, its receptive field."""
