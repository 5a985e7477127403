"""The bytes of a checkpoint: commit objects, frames, pickles, metadata.

Without torch and without I/O: `streams` reads and writes files of its caller, and `codec` runs the
functions of `frames` on threads, which saves, loads and `compression` share.
"""
