"""From settings and facts of the data to what trains: data sets, model, optimizer, device, open defaults."""
