"""Codes that are chosen with texts: block by block, so that what a model returns changes least."""
