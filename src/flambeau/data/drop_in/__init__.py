"""A user's DataLoader, read faster: it keeps its data set and transforms; flambeau decodes and crops."""
