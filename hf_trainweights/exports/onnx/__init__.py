"""Write ONNX files, compare them with their models, and run them."""
