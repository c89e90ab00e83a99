"""Inspects weight files, models and checkpoints: lists their tensors, compares two of them, and verifies a model."""
