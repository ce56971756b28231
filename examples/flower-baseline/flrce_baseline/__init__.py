"""FLrce as a Flower baseline."""
