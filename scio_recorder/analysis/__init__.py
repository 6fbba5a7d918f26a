"""What is found out from passes and recordings: where two runs differ, and what made a NaN."""
