"""Choices for a model: the configuration, a format for each weight, and a summary of both."""
