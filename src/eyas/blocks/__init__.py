"""Block drafters: one pass of a small net over the root and masks drafts all levels of a tree.

method_dflash.py, method_dspark.py    the methods, which `drafters` finds by these names
_method.py                            their base: heads on disk, new heads, trees
_net.py, _session.py, _loss.py        the net, its state of the rows, its training
"""
