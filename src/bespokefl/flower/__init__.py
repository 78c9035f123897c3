"""The same algorithm file as a real federation: between machines, on Flower."""

import os

# Flower reads these when it is imported: nothing is reported to anybody, and nobody is asked for newer versions.
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["FLWR_DISABLE_UPDATE_CHECK"] = "1"
