"""The papers' networks, by name: ``build("fedavg-cnn", (3, 32, 32), 10)``."""

from bespokefl.models.registry import MODELS, ModelSpec, build

__all__ = ["MODELS", "ModelSpec", "build"]
