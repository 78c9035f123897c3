"""Refusals: whatever is wrong with what came from the other side, it costs that side alone."""

import contextlib
from collections.abc import Iterator

from bespokefl.errors import RunError
from bespokefl.flower import limits
from bespokefl.plain import one_line


class Refused(RunError):
    """A message that is not what it should be; the text says why."""


@contextlib.contextmanager
def reading(what: str) -> Iterator[None]:
    """Reads what somebody else wrote: anything that goes wrong is a refusal with a reason."""
    try:
        yield
    except Refused:
        raise
    except Exception as error:  # the sender chose the content, so no kind of error can be left out
        said = one_line(str(error), limits.TEXT // 2)
        raise Refused(f"{what} cannot be read ({type(error).__name__}{': ' if said else ''}{said})") from error
