"""Saves: staging, packing, upload and commit."""
