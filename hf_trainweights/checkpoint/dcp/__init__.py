"""A directory that torch.distributed.checkpoint (DCP) wrote, read without executing its pickle."""
