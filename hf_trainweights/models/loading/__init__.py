"""The hooks of a load: weights quantized as they arrive, and weights that files hold quantized."""
