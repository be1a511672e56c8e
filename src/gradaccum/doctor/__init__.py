"""What a training script really does: run unmodified, under hooks, and judged by its trace."""
