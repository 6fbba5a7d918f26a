"""One dry run of a copy of the network, which gives its layers their labels."""
