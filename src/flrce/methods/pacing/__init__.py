"""One round, from task to record: the gate, the books, the roster, and whom to trust."""
