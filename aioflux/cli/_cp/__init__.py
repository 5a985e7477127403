"""`aioflux cp`.

command   options -> CopyRun: the stores it opens, the summary
sources   list what to copy -> jobs                              plan: jobs, names, batches (pure)
copier    batches of small objects, streams of large ones
objects, local_files   read and write them                       progress: cli/_progress.py
"""
