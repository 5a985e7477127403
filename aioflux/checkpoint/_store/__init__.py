"""The objects of a checkpoint in a store: data, commits, tags. Without torch."""
