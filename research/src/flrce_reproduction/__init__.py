"""The paper's tables and figures: cells to run, and what comes of them beside its numbers."""
