"""Sources of targets, and targets beyond plain weights. A module with a class `Extension` declares properties
of targets beyond layers with keys and values (`core.extensions`).

pretrained.py     read a model and its tokenizer from a folder or the hub
gguf_files.py     convert a file in GGUF format, once
loading.py        make the `Target`
adapters.py       LoRA and the like: merged, or chosen by requests
quantised.py      layers that a library keeps quantised
placement.py      layers on several devices, weights that wait elsewhere or are split over processes
recurrent.py      states of Mamba, delta nets and convolutions (state_modules.py)
media.py          prompts with images
fingerprints.py   whether a target is the one that a head was trained for; doubts about a head
plug_target.py    by which `eyas.load` finds GGUF files (core/sockets.py)
"""
