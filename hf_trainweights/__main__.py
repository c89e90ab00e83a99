"""`python -m hf_trainweights` is the `trainweights` command."""

from hf_trainweights.cli import main

main()
