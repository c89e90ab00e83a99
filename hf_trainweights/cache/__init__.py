"""A cache of keys and values in 16, 8 or 4 bits: it grows without copying, and attention reads it as it is stored."""
