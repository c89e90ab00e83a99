"""Checkpoints that other quantizers wrote, read into this package's formats without quantizing again."""
