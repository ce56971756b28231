"""What happens on a client."""
