"""The state of a training loop that you write yourself, saved and restored."""
