"""Uris, metadata, listings, checksums and counters; without I/O."""
