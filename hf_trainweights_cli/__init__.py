"""The `trainweights` command, apart from the library so that `--help` need not wait for Transformers to be imported."""
