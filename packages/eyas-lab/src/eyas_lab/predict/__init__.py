"""Predict the speed-up of speculative decoding by arithmetic, before a machine is bought or a head is trained.

    models.py      from a config.json to the bytes and operations of a pass of the target
    heads.py       the same for a draft, and how often its tokens are accepted
    machines.py    bandwidth, rates and overheads: of published GPUs, or of a JSON file
    measure.py     the same of this CPU, measured
    prediction.py  passes, drafts, c, tau, speed-ups

No weights are read. `speedup.py` finds the best tree.
"""

from eyas_lab.predict.heads import Head, read_head
from eyas_lab.predict.machines import MACHINES, Machine, read_machine
from eyas_lab.predict.models import Model, read_model
from eyas_lab.predict.prediction import Prediction, Settings, weights_of

__all__ = [
    "MACHINES",
    "Head",
    "Machine",
    "Model",
    "Prediction",
    "Settings",
    "read_head",
    "read_machine",
    "read_model",
    "weights_of",
]
