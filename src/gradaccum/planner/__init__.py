"""Which samples form which micro-batch, and the micro-batches themselves."""
