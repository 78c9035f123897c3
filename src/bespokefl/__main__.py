"""The `bespoke` command, as a program: ``python -m bespokefl``."""

from bespokefl.interrupts import listen


def main() -> None:
    """Runs the command line; a signal that comes early ends it as one that comes later does."""
    listen()
    from bespokefl.cli import main as command_line

    command_line()


if __name__ == "__main__":
    main()
