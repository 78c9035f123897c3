"""A silo: its data and the states of its clients, what it runs for a server, and what it refuses."""
