"""Block drafters: one pass of a small net over the root and masks drafts all levels of a tree.

method_dflash.py, method_dspark.py    the methods, which `drafters` finds by these names
_method.py                            their base: heads on disk, new heads, trees, the state of the rows
_net.py                               the net
"""

from eyas.blocks._method import BlockMethod, BlockTraining
from eyas.blocks._net import BlockNet

__all__ = ["BlockMethod", "BlockNet", "BlockTraining"]
