"""The recorder beside other tools; what imports one of them needs the extra of its name."""
