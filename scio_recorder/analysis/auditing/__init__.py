"""An audit of a recording that others made: which layer of the net each column really is."""
