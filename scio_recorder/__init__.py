"""Record and change what happens inside a PyTorch network."""
