"""Run by OpenVINO's Python: `python -m draft_vectors openvino_faults:Half`. OpenVINO GenAI keeps its own settings here."""

from draft_vectors.engines.openvino import OpenVino


class Half(OpenVino):
    """Keys and values in float16, its default on some processors: the accepted nodes of a tree are not moved."""

    cache = "f16"


class Above(OpenVino):
    """The layers that it takes by itself for larger targets, 2, L/2 and L-3: it reads their outputs."""

    layers = "2 3 4"
