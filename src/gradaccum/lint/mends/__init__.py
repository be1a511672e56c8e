"""The mends that are certain, made so that comments stay."""
