"""A checkpoint in whole files, which a Trainer on one rank or a plain loop writes."""
