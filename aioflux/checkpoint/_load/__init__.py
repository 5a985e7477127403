"""Loads of checkpoints: planning, reading and decoding.

state.py, StorageReader   make targets: tensors and values to load, each with its stored item
fetch.py                  loads all targets
copies.py                 target -> needed ranges of its object, and their copies into memory
plan.py                   needed ranges -> reads of each object (pure)
run_reads.py              runs the reads on the event loop: bounded, pinned, verified
decode.py                 items that must be read whole -> values and tensors

torch_file.py, reader.py  loads of one object that torch.save wrote
"""
