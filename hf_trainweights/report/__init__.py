"""Reports on a model or a training run: tables and pictures in one HTML file, which loads no other file."""
