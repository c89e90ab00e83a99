"""Looks into weight files and checkpoints: lists their tensors, and measures how much two of them differ."""
