"""Retention, verification, clean-up, history and copies of checkpoints."""
