"""A quantized model on disk and on the Hub: its files, its card, and what lies beside them."""
