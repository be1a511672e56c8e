"""The engine: one update from many micro-batches, equal to that of the whole batch."""
