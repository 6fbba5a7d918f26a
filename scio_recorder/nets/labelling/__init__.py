"""One dry run of a copy of the network, from which its layers get their labels."""
