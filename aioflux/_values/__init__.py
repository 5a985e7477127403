"""Values without I/O: uris, metadata, listings, checksums, counters."""
