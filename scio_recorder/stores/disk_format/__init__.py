"""The disk format: layers of samples in a folder, durable chunk by chunk.

This package knows tensors, sample ids and settings, and nothing of nets. ``docs/disk-format.md``
specifies what it writes.
"""

from scio_recorder.layer import TensorSpec
from scio_recorder.stores.disk_format.ids import SampleIds
from scio_recorder.stores.disk_format.jsons import JSON
from scio_recorder.stores.disk_format.kept import KeptBatches, KeptReader
from scio_recorder.stores.disk_format.reader import FileReport, RunReader
from scio_recorder.stores.disk_format.run import Packed
from scio_recorder.stores.disk_format.writer import RunWriter, holds_recording

__all__ = [
    "JSON",
    "FileReport",
    "KeptBatches",
    "KeptReader",
    "Packed",
    "RunReader",
    "RunWriter",
    "SampleIds",
    "TensorSpec",
    "holds_recording",
]
