"""What a person looks at; reads ledgers only."""
