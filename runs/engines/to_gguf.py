"""Run by a Python with torch and transformers: llama.cpp's own converter, on a model or head of eyas.

    to_gguf.py SOURCES TYPE MODEL OUTPUT [TARGET]      TYPE: f32, bf16, q8_0, ...; TARGET: of a head, or an option of the converter

The converter knows tokenizers by the hash of what they make of a text. The embedded model's is
unknown to it: byte-level pairs over GPT-2's expression, which is named here. It also has no
sentencepiece model, which the converter looks for first.
"""

import runpy
import sys


def main() -> None:
    sources, kind, model, output, *target = sys.argv[1:]
    sys.path[:0] = [sources, f"{sources}/gguf-py"]
    from conversion import base

    def missing(self: object, *_: object, **__: object) -> None:
        raise FileNotFoundError("no sentencepiece model")

    for converter in [one for one in vars(base).values() if isinstance(one, type)]:
        if "get_vocab_base_pre" in vars(converter):
            converter.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
        for name in ("_set_vocab_sentencepiece", "_set_vocab_llama_hf"):
            if name in vars(converter):
                setattr(converter, name, missing)
    sys.argv = ["convert_hf_to_gguf.py", model, "--outtype", kind, "--outfile", output]
    if target:
        sys.argv += target if target[0].startswith("--") else ["--target-model-dir", target[0]]
    runpy.run_path(f"{sources}/convert_hf_to_gguf.py", run_name="__main__")


if __name__ == "__main__":
    main()
