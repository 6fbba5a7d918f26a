"""Analyses of passes and recordings: how two runs differ, which call made a NaN, and more.

Who records, changes and collects activations, and asks no such question, would not miss this room.
"""
