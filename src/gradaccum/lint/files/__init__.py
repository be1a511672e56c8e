"""From what was asked for to modules: files, notebooks, and the statements that can matter."""
