"""What Flower runs on a node."""

from bespokefl.flower.apps import client_app

app = client_app  # assigned, because Flower looks for this line before it runs anything
