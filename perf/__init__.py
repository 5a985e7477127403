"""Measurements: one file per scenario, one per peer, side by side in one run."""
