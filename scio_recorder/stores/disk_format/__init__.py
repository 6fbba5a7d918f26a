"""The disk format: layers of samples in a folder, durable chunk by chunk.

This package knows tensors, sample ids and settings, and nothing of nets. ``docs/disk-format.md``
specifies what it writes.
"""
