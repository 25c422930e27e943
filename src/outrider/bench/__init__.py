"""Proof and measurement: the audit, its planted faults, and the tiny models they run on."""
