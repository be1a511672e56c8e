"""Bytes: what micro-batches take, how they travel, and what becomes of one that does not fit."""
