"""Formats chosen for a limit of bits or bytes: what each costs, what each loses, and the allocation that follows."""
