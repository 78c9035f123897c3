"""How models are scored: metrics, the scoring of every client's model, and the checks that model, loss and data fit.

Imports ``core``, ``data`` and ``engines``; the federation scores its clients with it, and everything above reads the
figures.
"""
