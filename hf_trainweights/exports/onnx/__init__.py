"""ONNX files: written, compared with the model they came from, and run."""
