"""A cache of objects on a local disk."""
