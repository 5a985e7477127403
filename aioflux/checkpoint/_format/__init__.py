"""Formats of stored checkpoints: commit objects, compressed frames, pickles, metadata.

No module here does I/O of its own, and only `nesting` imports torch. `streams` reads and writes
files that its caller opened, and `codec` runs the functions of `frames` on threads.
"""
