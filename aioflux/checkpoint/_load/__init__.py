"""Loads of checkpoints: planning, reading and decoding.

state.py, StorageReader   make targets: tensors and values to load, each with its stored item
fetch.py                  loads all targets: runs the reads on the event loop, bounded and verified
targets.py                target -> needed ranges of its object, and their copies into memory;
                          items that must be read whole -> values and tensors
plan.py                   needed ranges -> reads of each object (pure)

torch_file.py             loads of one object that torch.save wrote, or reads of it as a file
"""
