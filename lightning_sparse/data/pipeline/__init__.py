"""Samples to batches.

================ ======================================================================
sampler.py       which samples a rank sees at a step
loader.py        iterables for the Trainer, which save and restore their position
batch.py         a batch request, its samples and their crops
images.py        of images: choose the backend, dali.py or that of torch
workers.py       of other samples: functions of the user's own, in worker processes
prefetch.py      run an iterable ahead of time in a thread
================ ======================================================================
"""
