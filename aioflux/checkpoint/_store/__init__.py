"""The objects of checkpoints in a store, and all operations on them. Needs no torch.

steps                the commit objects: list, read, write
objects              data objects: write, read ranges, read whole objects into memory
tags                 checkpoints of named parts under a tag
verify               whether all objects of a checkpoint exist, with the right bytes
retention            which steps are kept, and the removal of the others
orphans              deletion of objects that no commit lists
copy, history        copies of checkpoints; the record of each save
"""
