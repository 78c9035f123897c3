"""What Flower runs on a node."""

from bespokefl.flower.apps import client_app as app  # noqa: F401
