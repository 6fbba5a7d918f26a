"""Analyses of passes and recordings: where two runs differ, and what made a NaN."""
