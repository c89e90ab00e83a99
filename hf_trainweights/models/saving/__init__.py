"""A quantized model on disk and on the Hub: its files, its card, and the files beside them."""
