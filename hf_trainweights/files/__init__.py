"""Bytes on disk: staged and durable writes, the names of weight files, and the digests that prove files intact."""
