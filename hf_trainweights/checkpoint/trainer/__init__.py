"""The compression of a Trainer's checkpoints in the background."""
