"""The federation: the round loop, clients in this process, who takes part, attacks, privacy, and clients that join.

Imports ``core``, ``data``, ``engines`` and ``evaluation``; experiments and real federations (``flower``) are built on
it.
"""

from bespokefl.federation.callbacks import Callback, Rounds
from bespokefl.federation.federation import Federation
from bespokefl.federation.loop import History, RoundRecord

__all__ = ["Callback", "Federation", "History", "RoundRecord", "Rounds"]
