"""What `trainweights demo` does."""
