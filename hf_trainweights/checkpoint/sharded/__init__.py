"""Sharded checkpoints: PyTorch's torch.distributed.checkpoint (DCP), with the codecs of this package in its files."""
