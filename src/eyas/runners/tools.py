"""Tools of the runners for other distributions: to read a model's layers, and to compare their own forward of a
target with the model's."""

from eyas.runners._comparison import UnsuitedError, compare, fault_of_runner
from eyas.runners._layer_settings import layer_windows, norm_eps

__all__ = ["UnsuitedError", "compare", "fault_of_runner", "layer_windows", "norm_eps"]
