"""Collecting a whole dataset: the loop over batches, and the intakes of stores and reductions."""
