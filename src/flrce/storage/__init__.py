"""What lasts: files, pages of tables, checkpoints, the ledger, and reading them back."""
