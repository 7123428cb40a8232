"""Measurements of eyas, and comparisons with other methods and engines: a distribution of its own.

    bench/        methods compared on tasks
    audit/        whether a deployment is lossless
    examine/      whether a draft head fits its target
    methods/      Medusa, Hydra, Kangaroo, GliDe, SpecTr, cascades, lookahead, REST and others; one file is one method
    formats/      published heads of Medusa and Hydra, adapters of Kangaroo and GliDe
    datastore.py  the sorted tokens in which REST looks
    commands/     `eyas demo`, `eyas bench`, `eyas tune`, `eyas audit`, `eyas examine`

eyas finds commands, methods and formats by entry points.
"""

__version__ = "0.1.0"
