"""Analyses of passes and recordings: how two runs differ, which call made a NaN, and more."""
