"""Credentials of the storage services."""
