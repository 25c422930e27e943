"""Drafting methods, one file each. A file here registers itself by name; nothing else in the package names it."""

AUTO = "ngram"
"""What `draft="auto"` picks while no trained drafter is at hand: it needs no weights and stays silent where it has no guess."""
