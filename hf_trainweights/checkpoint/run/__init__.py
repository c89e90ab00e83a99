"""The parts that all checkpoints of a run share: their anchor, their base, the checks of their files, and the ranks."""
