"""The one door to the private names of Transformers: those with an underscore, and those its documentation leaves out.

Transformers 5.17 to 5.23 have all of them; `tests/models/host/` asks the installed version for each. Where a version
lacks one, a plain fallback gives the right result, or a typed error says which versions are supported.
"""
