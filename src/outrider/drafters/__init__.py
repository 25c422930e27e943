"""Drafting methods, one file each. A file here registers itself by name; nothing else in the package names it."""
