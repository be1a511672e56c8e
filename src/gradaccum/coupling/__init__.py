"""What a batch cannot be split over, and the experiments that prove it."""
