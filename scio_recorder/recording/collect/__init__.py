"""Collecting a whole dataset: the loop, and what it hands to stores and reductions."""
