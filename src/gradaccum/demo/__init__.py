"""A demonstration on real text: three ways to make one update, side by side."""
