"""The engines that run a client's program on many clients."""

import torch

from bespokefl.engines.base import Engine
from bespokefl.engines.debug import Debug
from bespokefl.engines.sequential import Sequential
from bespokefl.engines.vectorized import Vectorized
from bespokefl.errors import InputError, unknown_name

ENGINES = {
    "vectorized": "all clients of a cohort at once: stacked, or side by side in threads",
    "sequential": "one client after another: the readable reference",
    "debug": "the same, stopped by the first error, which names round, client and stage; breakpoints work",
}

__all__ = ["ENGINES", "Debug", "Engine", "Sequential", "Vectorized", "build_engine", "pick_device"]


def build_engine(
    name: str = "vectorized",
    device: str = "auto",
    *,
    compile: bool = False,
    tf32: bool = True,
    lanes: int | None = None,
    stack: int | None = None,
    debug_client: int | None = None,
) -> Engine:
    """An engine by name on a device; ``lanes``, ``stack`` and ``compile`` concern the vectorized one.

    ``debug_client`` is for the debug engine: the only client for which ``breakpoint()`` stops.
    """
    if name not in ENGINES:
        raise unknown_name("engine.name", name, ENGINES)
    if compile not in (True, False):
        raise InputError(f"engine.compile = {compile!r}: it is true or false")
    for key, value in (("lanes", lanes), ("stack", stack)):
        if value is not None and value < 1:
            raise InputError(f"engine.{key} = {value}: it is a whole number of at least 1, or absent")
    if debug_client is not None and name != "debug":
        raise InputError(f"engine.debug_client = {debug_client} is for the engine 'debug', not {name!r}; leave it out")
    chosen = pick_device(device)
    if name == "debug":
        return Debug(chosen, tf32=tf32, client=debug_client)
    if name == "sequential":
        return Sequential(chosen, tf32=tf32)
    return Vectorized(chosen, lanes=lanes, stack=stack, compile=compile, tf32=tf32)


def pick_device(device: str) -> torch.device:
    """``auto`` is the GPU where there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"engine.device = {device!r} cannot be used here: {reason}. Use auto or cpu") from error
    return chosen
