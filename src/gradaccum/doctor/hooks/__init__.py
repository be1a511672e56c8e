"""Where torch is listened to: set once it is imported, removed in reverse order."""
