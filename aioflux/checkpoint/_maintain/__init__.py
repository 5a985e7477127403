"""Retention, verification, clean-up, history, tags and copies of checkpoints."""
