"""The bytes of a checkpoint: commit objects, frames, pickles, metadata. No I/O."""
