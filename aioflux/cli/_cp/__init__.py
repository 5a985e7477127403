"""`aioflux cp`.

command                the options, and CopyRun, which opens the stores and prints the summary
sources                lists the objects or files to copy, and yields a job for each
plan                   jobs, names at the target and batches, without I/O
copier                 copies batches of small objects, and streams large ones
objects, local_files   read and write objects of a store, and local files
"""
