"""`trainweights.json`: the files of a checkpoint with their digests, and what its values have lost."""
