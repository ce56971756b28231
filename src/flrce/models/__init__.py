"""Networks, and the flat vectors that travel."""
