"""Quantized models as GGUF files, which llama.cpp reads. Needs the package gguf, which only these modules import."""
