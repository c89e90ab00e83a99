"""Write quantized models as GGUF files, which llama.cpp reads. Only these modules import the package gguf."""
