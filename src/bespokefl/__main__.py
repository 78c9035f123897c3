"""``python -m bespokefl`` is the command ``bespoke``."""

from bespokefl.cli import main

main()
