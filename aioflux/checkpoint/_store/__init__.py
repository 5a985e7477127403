"""The objects of checkpoints in a store, and all operations on them. Needs no torch.

steps                the commit objects: list, read, write
objects              data objects: write, read ranges, read whole objects into memory
tags                 checkpoints of named parts under a tag
verify               whether all objects of a checkpoint exist, with the right bytes
retention            the removal of steps that no rule of retention_rules keeps
orphans              deletion of objects that no commit lists
copy, history        copies of checkpoints; the record of each save
"""
