"""What deploy/ holds: manifests that Kubernetes and Ray accept, and options that `eyas serve` has."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from eyas.errors import EyasError
from eyas.serve.server import IDLE_SECONDS
from eyas_ray.serving import arguments_of

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
PLAIN, RAY_SERVICE = DEPLOY / "kubernetes" / "eyas.yaml", DEPLOY / "kubernetes" / "rayservice.yaml"
FLEET = {"replicas", "max_replicas", "gpus"}  # arguments that are the fleet's


def read(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def kinds() -> dict[str, dict[str, Any]]:
    """The documents of the plain manifest by kind."""
    return {document["kind"]: document for document in read(PLAIN)}


def ray_configs() -> list[dict[str, Any]]:
    """The configurations of Ray Serve."""
    return [*read(DEPLOY / "ray" / "serve.yaml"), yaml.safe_load(read(RAY_SERVICE)[0]["spec"]["serveConfigV2"])]


def valid(document: dict[str, Any]) -> None:
    """Fail if Kubernetes' schema of the newest version that the validator knows refuses a document."""
    validate = pytest.importorskip("kubernetes_validate", reason="manifests are validated by `make scale`")
    validate.validate(document, validate.latest_version(), strict=True)


def test_the_plain_manifest() -> None:
    """Guards against fields that Kubernetes does not know. It ignores some of them silently."""
    for document in read(PLAIN):
        valid(document)


def test_the_pods_of_the_ray_service() -> None:
    """The same for the templates in KubeRay's resource, whose own schema is on no package index."""
    cluster = read(RAY_SERVICE)[0]["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        template = {"metadata": {"labels": {"a": "b"}}, **group["template"]}
        spec = {"selector": {"matchLabels": {"a": "b"}}, "template": template}
        valid({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "pods"}, "spec": spec})


def test_idle_connections_of_a_fleet() -> None:
    """Guards against resets: Ray's proxy closes idle connections after 90 s, and balancers keep them for up to 600 s."""
    for config in ray_configs():
        assert config["http_options"]["keep_alive_timeout_s"] == IDLE_SECONDS


def test_a_pod_outlives_its_answers() -> None:
    """Guards against answers that are cut: Kubernetes kills a pod when its grace period ends."""
    pod = kinds()["Deployment"]["spec"]["template"]["spec"]
    drain = next(a for a in pod["containers"][0]["args"] if a.startswith("--drain="))
    assert pod["terminationGracePeriodSeconds"] > int(drain.removeprefix("--drain="))
    group = read(RAY_SERVICE)[0]["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    assert group["template"]["spec"]["terminationGracePeriodSeconds"] > 60  # the default of --drain


def test_the_container_is_given_options_that_exist() -> None:
    """Guards against a pod that ends at once, with a line about an unknown option."""
    arguments = kinds()["Deployment"]["spec"]["template"]["spec"]["containers"][0]["args"]
    options = dict(argument.removeprefix("--").partition("=")[::2] for argument in arguments)
    assert options.pop("port")
    made = arguments_of({name: value or True for name, value in options.items()})
    assert made.server.json_logs


@pytest.mark.parametrize("config", ray_configs())
def test_configurations_of_ray_serve(config: dict[str, Any]) -> None:
    """Guards against arguments that no option takes, and an import path that leads nowhere."""
    application = config["applications"][0]
    module, _, name = application["import_path"].partition(":")
    assert (module, name) == ("eyas_ray.serving", "build_app")
    arguments_of({key: value for key, value in application["args"].items() if key not in FLEET})
    schema = pytest.importorskip("ray.serve.schema", reason="the configuration is validated by `make scale`")
    schema.ServeDeploySchema.model_validate(config)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"targt": "x"}, "there is no option 'targt' of eyas serve; did you mean target"),
        ({"rows": "many"}, "rows"),
        ({"port": 8000}, "http_options of the configuration has it"),
    ],
)
def test_wrong_arguments(wrong: dict[str, Any], message: str) -> None:
    """Guards against a traceback of Ray's where one line would do."""
    with pytest.raises(EyasError, match=message):
        arguments_of(wrong)


def test_values_of_arguments() -> None:
    """Guards against flags and lists that a configuration writes otherwise than a command line."""
    made = arguments_of(
        {"json_logs": True, "api_docs": False, "allowed_host": ["a", "b"], "name": None, "tree.nodes": 6}
    )
    assert (made.server.json_logs, made.server.api_docs, made.server.name) == (True, False, None)
    assert made.server.allowed_host == ("a", "b")
    assert made.options == {"tree.nodes": 6}


def test_the_chart_makes_the_plain_manifest() -> None:
    """Guards against two descriptions of one deployment that differ."""
    helm = shutil.which("helm")
    if helm is None:
        pytest.skip("the chart is rendered by helm, which is not on the PATH")
    command = [helm, "template", "eyas", str(DEPLOY / "helm" / "eyas")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert list(yaml.safe_load_all(done.stdout)) == list(yaml.safe_load_all(PLAIN.read_text()))
    full = [
        "--set",
        "target=T,draft=D,gpus=1,apiKeySecret=s,offline=true,cache.storageClass=nfs,arguments={--recall=64}",
    ]
    done = subprocess.run([*command, *full], capture_output=True, text=True, check=True)
    for document in yaml.safe_load_all(done.stdout):
        valid(document)
