"""Formats of stored checkpoints: commit objects, compressed frames, pickles, metadata.

No module here imports torch or does I/O of its own. `streams` reads and writes files that its
caller opened, and `codec` runs the functions of `frames` on threads.
"""
