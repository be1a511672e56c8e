"""Plain records of what happened, bounded in number, written as it happens."""
