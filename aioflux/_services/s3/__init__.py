"""Amazon S3, and other servers with its API."""
