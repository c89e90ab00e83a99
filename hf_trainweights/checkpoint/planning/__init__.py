"""Which codec each tensor of a checkpoint gets, before anything is encoded."""
