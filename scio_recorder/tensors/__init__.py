"""Tools for tensors and the structures that hold them, and checks of plain arguments."""
