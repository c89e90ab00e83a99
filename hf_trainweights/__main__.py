"""`python -m hf_trainweights` is the `trainweights` command."""

from trainweights_cli.main import main

main()
