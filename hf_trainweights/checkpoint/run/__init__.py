"""What all checkpoints of a run share: their anchor, which of them is whole, and what may go."""
