"""What several codecs consist of: tiles, levels, symbols, entropy coding and memory."""
