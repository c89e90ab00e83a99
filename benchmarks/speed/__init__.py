"""The parts of `python -m benchmarks.run`: what is compared, and how each figure is taken."""
