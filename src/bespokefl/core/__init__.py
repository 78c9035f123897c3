"""What a method is written with: algorithms and hyper-parameters, programs, cohorts, tasks, trees, averages, solvers.

An author of a method imports from here: ``from bespokefl.core import Algorithm, Program, Phase, hyper``.
Nothing in this room knows data, engines, federations or files; it imports torch, numpy, scipy, and ``nn`` for the
layers that a task's model is built from. Every other room but ``nn`` may import it.
"""

from bespokefl.core import trees
from bespokefl.core.acting import never, unless, when
from bespokefl.core.algorithm import Algorithm, Newcomer, OneModel, Setup, Training, without_momentum, x_of
from bespokefl.core.averaging import ModelAveraging
from bespokefl.core.clients import Postprocessor, Transfer
from bespokefl.core.cohort import Cohort, Uploads
from bespokefl.core.common_direction import columns_of, common_direction, lengths, unfairness, weighted_sum
from bespokefl.core.exchange import BODY, CHANGE, GRADIENT, LOSS, MODEL, ONE_BATCH, STATISTICS, Exchange
from bespokefl.core.headed import Headed
from bespokefl.core.hyper import hyper
from bespokefl.core.hypernetwork import HyperNetwork, generate, initial_parameters, pull_phi, pull_v
from bespokefl.core.layer_groups import Grouping, Part, layers_of
from bespokefl.core.losses import add_to_logits, class_logits, cross_entropy
from bespokefl.core.model_programs import GLOBAL_MODEL, hand_over, network_outputs, received
from bespokefl.core.optim import SGD, Adagrad, Adam, AdamW, Buffers, Optimizer, RMSprop
from bespokefl.core.optimizers import OPTIMIZERS
from bespokefl.core.program import (
    Batches,
    Call,
    Down,
    Order,
    Phase,
    Program,
    Result,
    Rows,
    ordered,
    shuffled,
)
from bespokefl.core.proximal import part_way, pulled, server_step
from bespokefl.core.registry import Chosen, Registry
from bespokefl.core.rng import derived_seed, stream
from bespokefl.core.solvers import gram, min_norm, min_norm_near, nearest_directions
from bespokefl.core.task import Answer, Batch, HeadSizes, Layer, Pass, Task
from bespokefl.core.trees import Model, Tree
from bespokefl.errors import InputError, RunError
from bespokefl.nn.counter_rng import keyed_normal

__all__ = [
    "BODY",
    "CHANGE",
    "GLOBAL_MODEL",
    "GRADIENT",
    "LOSS",
    "MODEL",
    "ONE_BATCH",
    "OPTIMIZERS",
    "SGD",
    "STATISTICS",
    "Adagrad",
    "Adam",
    "AdamW",
    "Algorithm",
    "Answer",
    "Batch",
    "Batches",
    "Buffers",
    "Call",
    "Chosen",
    "Cohort",
    "Down",
    "Exchange",
    "Grouping",
    "HeadSizes",
    "Headed",
    "HyperNetwork",
    "InputError",
    "Layer",
    "Model",
    "ModelAveraging",
    "Newcomer",
    "OneModel",
    "Optimizer",
    "Order",
    "Part",
    "Pass",
    "Phase",
    "Postprocessor",
    "Program",
    "RMSprop",
    "Registry",
    "Result",
    "Rows",
    "RunError",
    "Setup",
    "Task",
    "Training",
    "Transfer",
    "Tree",
    "Uploads",
    "add_to_logits",
    "class_logits",
    "columns_of",
    "common_direction",
    "cross_entropy",
    "derived_seed",
    "generate",
    "gram",
    "hand_over",
    "hyper",
    "initial_parameters",
    "keyed_normal",
    "layers_of",
    "lengths",
    "min_norm",
    "min_norm_near",
    "nearest_directions",
    "network_outputs",
    "never",
    "ordered",
    "part_way",
    "pull_phi",
    "pull_v",
    "pulled",
    "received",
    "server_step",
    "shuffled",
    "stream",
    "trees",
    "unfairness",
    "unless",
    "weighted_sum",
    "when",
    "without_momentum",
    "x_of",
]
