"""Credentials and request signatures of the storage services."""
