"""What Flower runs on the server."""

from bespokefl.flower.apps import server_app

app = server_app  # assigned, because Flower looks for this line before it runs anything
