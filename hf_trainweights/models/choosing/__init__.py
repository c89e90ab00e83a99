"""What a model is quantized to: the configuration, a format for each weight, and a summary of the choices."""
