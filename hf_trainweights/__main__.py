"""`python -m hf_trainweights` is the `trainweights` command."""

from hf_trainweights_cli.main import main

main()
