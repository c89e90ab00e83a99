"""A Trainer's checkpoints, made small in the background."""
