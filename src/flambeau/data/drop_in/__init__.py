"""A user's DataLoader, read faster: data set and transforms are theirs, decoding and cropping ours."""
