"""The server's own part once replies are in: its averages."""
