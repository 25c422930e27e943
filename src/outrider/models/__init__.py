"""Models: from a name to a loaded target, and the pass that scores guesses."""
