"""Clients that are compared: one module for each, with a function for each operation it supports.

An operation takes a `Work` and returns the bytes that it moved:

* `get_many`, `put_many`: read or write every key, `in_flight` at a time.
* `get_one`, `get_into`, `put_one`: one object after the other, in ranges or parts if the client is
  faster with them; `get_into` reads into the same memory, the others into new memory.
* `get_range`: read each object in ranges. `first_get`: read every key in a fresh process.
* `list_all`: list a set. `load`, `stream`: read an epoch of a map-style or an iterable dataset.
* `save_state`, `load_state`: one object with all tensors. `save_steps`, `load_steps`: small
  checkpoints one after the other. `save_dcp`, `load_dcp`: `torch.distributed.checkpoint`.
* `stage`: copy a state, for which the training waits.
* `read_ray`, `write_ray`, `train_ray`: on a node of Ray.
"""
