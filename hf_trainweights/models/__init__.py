"""A quantized Transformers model, from `from_pretrained` to the Hub."""
