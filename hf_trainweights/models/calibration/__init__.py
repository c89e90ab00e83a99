"""Codes chosen with texts, block by block, so that the outputs of a model change least."""
