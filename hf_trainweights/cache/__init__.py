"""A cache of keys and values for `generate`: it grows without copying, in 16, 8 or 4 bits, and is read as it is stored."""
