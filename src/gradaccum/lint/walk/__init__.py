"""Walk one training loop, following values, and leave a trace of what happens when."""
