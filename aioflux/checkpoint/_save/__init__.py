"""Saves: staging, upload and commit."""
