"""Choosing hyper-parameters by validation accuracy, with the same budget for every method: `bespoke tune`.

Test samples take no part: trials run on data from which they are gone. Ranges and pruning are left to optuna, an
optional package; the trials' files are ours, and before each trial optuna's study is built from them anew.
"""

from bespokefl.tuning.tuner import MethodResult, Tuning, tune

__all__ = ["MethodResult", "Tuning", "tune"]
