"""What is done with trained models: export to ONNX and torch, predictions, a model for a client that comes later.

Imports ``experiments`` and all below; the command line and ``flower`` use it.
"""
