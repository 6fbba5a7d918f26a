"""Facts about a recording as a whole, in words."""

from __future__ import annotations

from rich.filesize import decimal

from scio_recorder.recording.readable import Readable


def facts_of(recording: Readable) -> list[tuple[str, str]]:
    """Return names and values for the head of a page."""
    stored = [recording[label] for label in recording.stored]
    size = sum(samples.nbytes for samples in stored)
    facts = [
        ("Samples", f"{recording.num_samples:,}"),
        ("Layers recorded", f"{len(list(recording)):,} of {len(recording.architecture):,}"),
        ("Kept as samples", f"{len(stored):,}, {decimal(size)}" if stored else "none"),
        ("Fingerprint of the net", recording.architecture.fingerprint[:12]),
    ]
    if recording.reductions:
        facts.append(("Kept as summaries", f"{len(recording.reductions):,}"))
    ids = recording.sample_ids
    if len(ids):
        facts.insert(1, ("First and last id", f"{ids[0]}, {ids[-1]}"))
    for key, name in (("dtype", "Kept in"), ("every", "Every n-th batch")):
        value = recording.settings.get(key)
        if value not in (None, 1):
            facts.append((name, str(value)))
    return facts


def notes_of(recording: Readable) -> list[str]:
    """Return what a reader has to know before looking at numbers."""
    notes = []
    if not recording.complete:
        notes.append("The recording was interrupted: these are the samples that it has so far.")
    if not recording.num_samples:
        notes.append("There are no samples.")
    return notes
