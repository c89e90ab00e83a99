"""`trainweights demo`: a model is trained, quantized, used, saved and reloaded, and all of it measured."""
