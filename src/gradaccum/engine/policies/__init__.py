"""What the user picks for layers that a split batch would change: BatchNorm and dropout."""
