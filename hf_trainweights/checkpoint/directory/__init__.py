"""One checkpoint directory: its files, its manifest, and the anchor that it is stored against."""
