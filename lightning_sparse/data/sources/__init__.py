"""Where samples come from: the layouts of a source, and network storage, which is read in a process of its own.

================= ========================================================================================
listing.py        the samples of a split: found in the source, kept in the cache, found again when it changes
layout.py         the layouts: lists, folders, shards of WebDataset, Parquet files
manifest.py       the samples of a split, and the file that keeps them
storage.py        reads network storage, waits for it, gives up; storage_reader.py is the program of its process
================= ========================================================================================
"""
