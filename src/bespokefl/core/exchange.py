"""What leaves a client in a round of a method: declared by the method, checked by silos, and printed in the docs."""

from collections.abc import Mapping
from typing import NamedTuple

from bespokefl.core.acting import ALWAYS, Condition

MODEL = "a model after local steps"
CHANGE = "the change of a model by local steps"
BODY = "the body of a model after local steps"
STATISTICS = "running statistics of its inputs"
LOSS = "its mean training loss at the model that came"
GRADIENT = "its gradient at a known model, over all its training samples"
ONE_BATCH = "steps on a single batch"


class Exchange(NamedTuple):
    """A program that ``round`` runs on clients, and what it sends back; all other programs only make a model."""

    program: str
    sends: Mapping[str, str] = {}  # by the name of an upload: what it holds, in words
    after: tuple[str, ...] = ()  # the programs that it may follow in a round; none: a round may begin with it
    most: int = 1  # times in a round
    only: Condition = ALWAYS  # the hyper-parameters under which a round has it
    shows: str = ""  # why samples may be read off what it sends, where one step or gradient is all of it
