"""Read GGUF files, which llama.cpp writes: the bytes, the blocks of weights, the names and rows, the settings."""
