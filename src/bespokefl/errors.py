"""The errors a user can meet, apart from programming errors."""

import difflib
import errno
import re
from collections.abc import Iterable


class BespokeError(Exception):
    """Base of the errors below; its text is meant for the user and stands alone."""


class InputError(BespokeError, ValueError):
    """The input is wrong (exit code 2): the message names the key, the value seen, and what is allowed."""


class RunError(BespokeError, RuntimeError):
    """The run failed while it was going (exit code 1); what was finished is kept."""


class EndedEarly(RunError):
    """A run that cannot go on, although what it has is whole: its files are written as of a finished one."""


class Diverged(EndedEarly):
    """The models of a run are lost (exit code 3): its settings do not suit it."""


REMEDY = "a smaller train.lr is the usual remedy"  # of a run that diverged


def in_short(error: BaseException) -> str:
    """What went wrong, for a line of the terminal; the trace has the rest."""
    from torch import OutOfMemoryError  # slow: only here, where it is loaded anyway

    if isinstance(error, OutOfMemoryError):
        return (
            "out of GPU memory; fewer runs at once (engine.together, --jobs) or fewer clients at once (engine.stack) "
            "take less, and --resume goes on from the last checkpoint with either"
        )
    return f"{type(error).__name__}: {error}"


_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def no_room(error: BaseException | None) -> bool:
    """Whether something could not be written because the disk is full, or a limit on files is reached."""
    while error is not None:
        told = re.search(r"\(os error (\d+)\)", str(error))  # of safetensors, which knows no errno
        if (error.errno if isinstance(error, OSError) else int(told[1]) if told else None) in _NO_ROOM:
            return True
        error = error.__cause__
    return False


def nearest(seen: str, allowed: Iterable[str]) -> str:
    """A hint with the names most alike, and all that are allowed."""
    names = list(allowed)
    near = difflib.get_close_matches(seen, names, n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    return f"{hint} Allowed: {', '.join(names) or 'none'}."


def unknown_name(
    key: str, value: object, allowed: Iterable[str], *, what: str = "known", seen: str | None = None
) -> InputError:
    """The error for a name outside a closed list; suggests those nearest to ``seen`` (the value by default)."""
    return InputError(f"{key} = {value!r} is not {what}.{nearest(str(value) if seen is None else seen, allowed)}")
