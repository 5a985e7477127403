"""Amazon S3 and the servers that speak its API."""
