"""Training of drafters: the target writes the texts, a drafter's pupil learns from what it saw. No method is named here."""
