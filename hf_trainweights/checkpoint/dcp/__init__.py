"""Reading a directory of torch.distributed.checkpoint (DCP), without executing its pickle."""
