"""What a training script really does: it is run unmodified, under hooks, and judged by its trace."""
