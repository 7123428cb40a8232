"""OpenVINO GenAI, in this process: `python -m draft_vectors draft_vectors.engines.openvino:OpenVino`.

optimum-intel converts the target and the heads, and OpenVINO GenAI runs chains and trees of EAGLE-3 and chains of DFlash. Its random
numbers are its own, so greedy cases run. `make interop` of eyas installs it in .venv-openvino.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino  # type: ignore[import-not-found]
import openvino_genai as genai  # type: ignore[import-not-found]

from draft_vectors.decode import Case
from draft_vectors.runner import Answer, Engine

__all__ = ["OpenVino"]

EXACT = {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "f32"}


class OpenVino(Engine):
    """Its pipeline, one head at a time."""

    name = "OpenVINO GenAI"
    layers = "1 2 3"  # of EAGLE-3: it counts outputs of layers, and the head's file inputs (2, 3, 4)
    cache = "f32"  # type of keys and values; its default here is f16, with which trees change texts

    def __init__(self, data: Path, dtype: str = "float32") -> None:
        if dtype != "float32":
            raise ValueError("this class runs OpenVINO GenAI in float32")
        super().__init__(data, dtype)
        self.place = tempfile.TemporaryDirectory()
        self.pipelines: dict[str, Any] = {}

    def converted(self, method: str) -> Path:
        """Return the folder of the target or a head, by optimum-intel."""
        made, model = Path(self.place.name) / method, self.data / method
        if made.exists():
            return made
        if method == "eagle3":
            model = Path(self.place.name) / "published"
            shutil.copytree(self.data / method, model)
            config = json.loads((model / "config.json").read_text())
            config["architectures"] = ["LlamaForCausalLMEagle3"]  # by which it knows EAGLE-3
            (model / "config.json").write_text(json.dumps(config))
        command: list[Any] = [Path(sys.executable).with_name("optimum-cli"), "export", "openvino", "--model", model]
        options = ["--task", "text-generation-with-past", "--weight-format", "fp32", "--trust-remote-code"]
        subprocess.run([*command, *options, made], check=True, stdout=subprocess.DEVNULL)
        if method == "eagle3":
            file = made / "openvino_model.xml"
            said = '<eagle3_mode value="True" />'
            layers = f'<hidden_layers_list value="{self.layers}" />'
            file.write_text(file.read_text().replace(said, said + layers))
        return made

    def pipeline(self, method: str) -> Any:
        """Return the pipeline with a head."""
        if method not in self.pipelines:
            exact = {**EXACT, "KV_CACHE_PRECISION": self.cache}
            more = {"draft_model": genai.draft_model(str(self.converted(method)), "CPU", **exact)}
            if method == "dflash":  # refuses the pipeline's own settings: they keep the cache of earlier prompts
                more["scheduler_config"] = scheduler = genai.SchedulerConfig()
                scheduler.enable_prefix_caching, scheduler.max_num_batched_tokens = False, 2**30
            self.pipelines = {method: genai.LLMPipeline(str(self.converted("target")), "CPU", **exact, **more)}
        return self.pipelines[method]

    def generate(self, case: Case, prompt: Sequence[int]) -> Answer | None:
        tree = case.tree == "dynamic" and case.method == "eagle3"
        if case.rule != "greedy" or case.method not in ("eagle3", "dflash") or not (tree or case.tree == "chain"):
            return None
        pipeline = self.pipeline(case.method)
        limits = pipeline.get_generation_config()
        limits.do_sample, limits.max_new_tokens, limits.ignore_eos = False, case.new_tokens, True
        limits.num_assistant_tokens = case.nodes - 1
        if tree:
            limits.branching_factor, limits.tree_depth = case.branch, case.depth
        result = pipeline.generate(openvino.Tensor(np.array([list(prompt)], np.int64)), limits)
        steps = result.extended_perf_metrics.main_model_metrics.raw_metrics.m_batch_sizes
        return Answer(list(result.tokens[0]), [tokens - 1 for tokens in steps[1:]])  # the first step reads the prompt
