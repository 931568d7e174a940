"""Where samples come from: the layouts of a source, and network storage, which is read in a process of its own.

================= ========================================================================================
listing.py        the samples of a split: found in the source, kept in the cache, found again when it changes
layout.py         what a layout is; folders of classes, and files without labels
lists.py          samples that a CSV or Parquet file names
tar.py            shards of WebDataset
parquet.py        Parquet files, also those of a repository of Hugging Face
manifest.py       the samples of a split, and the file that keeps them
storage.py        reads network storage, waits for it, gives up; storage_reader.py is the program of its process
================= ========================================================================================

A layout is a class that is named in `listing.LAYOUTS`.
"""
