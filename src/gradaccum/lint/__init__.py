"""Faults of training loops, found in their source alone."""
