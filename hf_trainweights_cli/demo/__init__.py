"""`trainweights demo`: trains, quantizes, uses, saves and reloads a model, and measures each step."""
