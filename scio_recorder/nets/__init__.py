"""Labels, operations, attention, selection, records of a pass, and runs without a trace."""
