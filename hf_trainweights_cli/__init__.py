"""The `trainweights` command. It is a package of its own, so that `--help` does not import Transformers."""
