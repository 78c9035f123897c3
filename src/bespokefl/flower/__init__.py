"""The same algorithm file as a real federation: between machines, on Flower."""
