"""How the gradients of processes become one: of copies of the model, of its shards, or in fixed parts."""
