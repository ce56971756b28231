"""What came of runs: tables, a page, figures, and answers. Reads run directories only."""
