"""Building blocks that several codecs share: tiles, levels, symbols, entropy coding and memory."""
