"""Two runs compared: to the first step, and there the first module and tensor, in which they part."""
