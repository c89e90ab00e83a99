"""A checkpoint directory, whichever of the two layouts it has: found, cleaned, made small and made plain."""
