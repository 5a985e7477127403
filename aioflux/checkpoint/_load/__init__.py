"""Loading: reads are planned, fetched and decoded.

load_state (state.py), StorageReader       targets: tensors and values, each with its stored item
fetch.py           all targets of a load
copies.py        target -> ranges of its item, and their copies into memory
plan.py          needed ranges of an object -> reads; pure
run_reads.py     reads -> event loop: bounded, pinned, verified, frames decoded
decode.py        whole items: values, and tensors that no range shows

load.py, reader.py                         one object that torch.save wrote
"""
