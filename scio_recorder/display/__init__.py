"""Tables, trees, plots and pages, as functions of plain data."""
