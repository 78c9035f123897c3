"""Whether Flower is there, in the release that this package was written for."""

from importlib import metadata

from bespokefl.errors import InputError

RELEASE = "1.41"  # modules of Flower below its public surface are used (fleet.py, control.py, superlink.py)


def require_flower() -> None:
    try:
        seen = metadata.version("flwr")
    except metadata.PackageNotFoundError:
        raise InputError("Flower is not installed; install it with: pip install 'bespokefl[flower]'") from None
    if not seen.startswith(f"{RELEASE}."):
        raise InputError(f"flwr {seen} is installed; allowed: {RELEASE}.*. Use: pip install 'bespokefl[flower]'")
