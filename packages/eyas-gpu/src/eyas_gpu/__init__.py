"""Triton kernels for GPUs: attention of tree nodes split over the keys, the steps between a layer's matrix
products, verification, and draft nets in fp8.

    runner.py               what eyas asks for: operations of a cycle, layers of a target
    cycle.py                scores, draws, paths, commits and draft nets by kernels
    layers.py               layers of the LLaMA shape by few kernels
    operators.py            the kernels as operators of torch
    _draft_net.py           a copy of a draft net whose layers run by the kernels
    _matrices.py, _fp8.py   matrices with one input as one; linear layers in fp8
    _tables.py              cosines and sines by position
    _trial.py               tries the kernels on this GPU before they are used
    _reference.py           what each kernel computes, in torch
    _attention_kernels.py   Triton: attention over parts of the keys, and their combination
    _layer_kernels.py       Triton: residual and norm, rotation and cache, SwiGLU, rounding to fp8
    _score_kernels.py       Triton: scores by temperature, top-k, top-p and min-p
    _cycle_kernels.py       Triton: draws with noise, the accepted path, its commit

It is its own distribution, and eyas finds it by an entry point of the group "eyas.parts". CUDA graphs are eyas'
own (`eyas.runners`). Triton is imported on a GPU only; its interpreter runs the kernels' tests on a CPU.
"""

__version__ = "0.1.0"
