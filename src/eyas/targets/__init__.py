"""Where targets come from, and what they may be beyond plain weights.

pretrained.py     read a model and its tokenizer from a folder or the hub
gguf_files.py     convert a file in GGUF format, once
loading.py        make the `Target`
adapters.py       LoRA and the like: merged, or chosen by requests
quantised.py      layers that a library keeps quantised
fingerprints.py   whether a target is the one that a head was trained for
"""
