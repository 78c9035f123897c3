"""The server of a real federation: who is there, what is asked of them, and what of their answers is believed."""
