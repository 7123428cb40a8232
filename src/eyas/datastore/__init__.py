"""A datastore: texts as token ids, in which the longest end of a context is looked up (REST, He et al. 2023, arXiv 2311.08252, section 3).

    FOLDER/manifest.json                 which tokenizer and sources, which segments; written last, so what it names is whole
           HASH.tokens.npy               a segment's documents, end to end
           HASH.suffixes.npy             the places of all its suffixes, in order
           parts/                        while it is built: the tokens of each source, so that an interrupted build goes on

    _suffixes.py    the order of suffixes          _segment.py    one text and its suffixes
    _manifest.py    what the folder says of itself _build.py      sources to segments, appending, merging
    _store.py       segments together: looking up

Everything is mapped, not read: opening takes no time, and memory is the system's cache. This room knows no model, no tokenizer and no tree.
"""

from __future__ import annotations

from eyas.datastore._build import Settings, Source, build
from eyas.datastore._manifest import DEPTH, Manifest
from eyas.datastore._store import Datastore

__all__ = ["DEPTH", "Datastore", "Manifest", "Settings", "Source", "build"]
