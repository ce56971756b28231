"""The command line and the Flower apps."""
