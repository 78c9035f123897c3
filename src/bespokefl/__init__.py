"""Personalised federated learning: an algorithm written for one client, run on many."""

__version__ = "0.1.0"
