"""Run by vLLM's Python: `python -m draft_vectors vllm_layers:Above`, vLLM with a fault that its user makes in config.json."""

import json
import shutil
import tempfile
from pathlib import Path

from draft_vectors.engines.vllm import Vllm


class Above(Vllm):
    """vLLM reads the states one layer above those that the EAGLE-3 head was trained with."""

    def __init__(self, data: Path, dtype: str = "float32") -> None:
        copied = Path(tempfile.mkdtemp()) / "data"
        shutil.copytree(data, copied)
        file = copied / "eagle3" / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "eagle_aux_hidden_state_layer_ids": [3, 4, 5]}))
        super().__init__(copied, dtype)
