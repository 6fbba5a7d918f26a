"""The labelled architecture of a network, its selectors, and records by label."""
