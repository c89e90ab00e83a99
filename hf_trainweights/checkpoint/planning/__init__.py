"""Plans the codecs of each tensor of a checkpoint, before anything is encoded."""
