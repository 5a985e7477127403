"""The objects of a checkpoint in a store: data objects, commit objects, tags. Needs no torch."""
