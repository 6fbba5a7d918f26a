"""The labelled architecture of a network, and what is chosen and kept by its labels."""
