"""Sources of images, their decoding, augmentation and loading. May import recipes."""
