"""Saving: staging, packing, upload and commit."""
