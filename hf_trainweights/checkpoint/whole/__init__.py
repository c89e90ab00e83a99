"""A checkpoint in whole files, as a Trainer on one rank or a plain loop writes it."""
