"""Bytes on disk: how files are written, which of them hold weights, and what proves them whole."""
