"""eyas inside of transformers: three ways to give its drafts to `model.generate` (docs/guide/transformers.md).

    model.generate(**inputs, custom_generate=eyas.hf(draft=...))
    eyas.attach(model, draft=...)               afterwards `model.generate`, pipelines and lm-eval work as before
    model.generate(**inputs, custom_generate="path/or/hub-id", trust_remote_code=True)      by a head's own folder

custom.py      what transformers calls instead of its own loop, and the LLMs of each model
sampling.py    its padded batches as prompts, its processors as the engine's sampling
loop.py        tokens of all rows in step, for criteria and streamers
refusals.py    what cannot be kept, by name

transformers prepares everything as always: the generation config, the processors, the stopping
criteria. Only its decoding loop is replaced.
"""

from eyas.hooks.custom import (
    Attachment,
    CustomGenerate,
    attach,
    detach,
    generate_by_folder,
    hf,
)

__all__ = ["Attachment", "CustomGenerate", "attach", "detach", "generate_by_folder", "hf"]
