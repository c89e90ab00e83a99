"""Formats chosen for a limit of bits or bytes: the size and the loss of each, and the allocation."""
