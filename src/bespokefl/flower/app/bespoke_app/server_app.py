"""What Flower runs on the server."""

from bespokefl.flower.apps import server_app as app  # noqa: F401
