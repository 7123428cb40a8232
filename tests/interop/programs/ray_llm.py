"""Serve eyas' embedded model behind `ray.serve.llm`, and ask it over HTTP what standard input says.

The question: {"source": FOLDERS of eyas and eyas_ray, "port": N, "requests": [[PATH, BODY], ...]}. The answer, the last line:
[[STATUS, TEXT], ...].
"""

import json
import os
import sys
import urllib.error
import urllib.request
from typing import Any


def answered(url: str, body: dict[str, Any]) -> tuple[int, str]:
    """Return the status and the text of an answer."""
    headers = {"content-type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def main() -> None:
    """Serve, ask, and print the answers."""
    question = json.load(sys.stdin)
    sys.path[:0] = question["source"].split(os.pathsep)
    os.environ |= {"PYTHONPATH": question["source"], "RAY_USAGE_STATS_ENABLED": "0"}  # for the replicas, too
    import ray
    from ray import serve
    from ray.serve.llm import LLMConfig, LLMServingArgs, build_openai_app

    config = LLMConfig(
        model_loading_config={"model_id": "small", "model_source": "embedded"},
        server_cls="eyas_ray.serving:EyasLLMServer",
        engine_kwargs={"method": "suffix", "rows": 2},
        deployment_config={"num_replicas": 1},
        log_engine_metrics=False,
    )
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": question["port"]})
    serve.run(build_openai_app(LLMServingArgs(llm_configs=[config])), name="small")
    base = f"http://127.0.0.1:{question['port']}"
    answers = [answered(base + path, body) for path, body in question["requests"]]
    serve.shutdown()
    ray.shutdown()
    print(json.dumps(answers))


main()
