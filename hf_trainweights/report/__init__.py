"""Draws what lies in a model or a training run, as one HTML file that needs nothing else to be read."""
