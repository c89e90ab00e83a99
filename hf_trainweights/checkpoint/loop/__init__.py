"""A training loop of one's own: its state, saved and restored."""
