"""Implementations of interfaces of other libraries: fsspec, Lightning, DeepSpeed."""
