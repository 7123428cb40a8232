"""A datastore: texts as token ids, searched for the longest suffix of a context (REST, He et al.
2023, arXiv 2311.08252, section 3).

    FOLDER/manifest.json                 tokenizer, sources and segments; written last, so the files that it names are whole
           HASH.tokens.npy               a segment's documents, end to end
           HASH.suffixes.npy             the positions of all its suffixes, in sorted order
           parts/                        during a build: the tokens of each source, so that an interrupted build continues

    _suffixes.py    sorting of suffixes            _segment.py    one text and its suffixes
    _manifest.py    manifest and files             _build.py      sources to segments, appending, merging
    _store.py       look-ups in all segments

All files are memory-mapped: opening takes no time, and the system's cache is the memory. This
package knows no model, no tokenizer and no tree.
"""

from __future__ import annotations

from eyas.datastore._build import Settings, Source, build
from eyas.datastore._manifest import DEPTH, Manifest
from eyas.datastore._store import Datastore

__all__ = ["DEPTH", "Datastore", "Manifest", "Settings", "Source", "build"]
