"""How a quantized weight is written in the plain ops of one kind of file; each target is one file."""
