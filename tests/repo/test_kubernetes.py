"""The example Job is one that Kubernetes takes, and what it runs is what torchrun and we take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from wholebatch.cli.app import load

kubernetes_validate = pytest.importorskip("kubernetes_validate")
yaml = pytest.importorskip("yaml")

MANIFEST = Path(__file__).parents[2] / "examples/kubernetes_job.yaml"


@pytest.fixture(scope="module")
def resources() -> dict[str, Any]:
    manifest = MANIFEST.read_text(encoding="utf-8")
    return {resource["kind"]: resource for resource in yaml.safe_load_all(manifest)}


@pytest.mark.parametrize("version", ["1.31", kubernetes_validate.latest_version()])
def test_follows_the_schema_of_the_api(resources: dict[str, Any], version: str) -> None:
    assert resources.keys() == {"Service", "Job"}
    for resource in resources.values():
        kubernetes_validate.validate(resource, version, strict=True)


@pytest.mark.parametrize("version", ["1.31", kubernetes_validate.latest_version()])
def test_the_job_that_tunes_follows_the_schema_and_its_options_are_tune_s(version: str) -> None:
    job = yaml.safe_load(MANIFEST.with_name("kubernetes_tune.yaml").read_text(encoding="utf-8"))
    kubernetes_validate.validate(job, version, strict=True)
    [container] = job["spec"]["template"]["spec"]["containers"]
    words = container["args"]
    assert words[1:4] == ["-m", "wholebatch.cli", "tune"]
    command: Any = load("tune")
    assert command.parse(words[4:])["as_json"]


def test_the_pods_find_each_other(resources: dict[str, Any]) -> None:
    """What no schema says: names and numbers that must be the same in several places."""
    service, job = resources["Service"], resources["Job"]
    name, spec = job["metadata"]["name"], job["spec"]
    pod = spec["template"]["spec"]
    [container] = pod["containers"]
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert service["spec"]["clusterIP"] == "None"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == int(environment["PET_NNODES"])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(
        environment["PET_NPROC_PER_NODE"]
    )
    port = service["spec"]["ports"][0]["port"]
    assert environment["PET_RDZV_ENDPOINT"] == f"{name}-0.{pod['subdomain']}:{port}"


def test_torchrun_and_the_command_take_their_arguments(
    resources: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.run import get_args_parser

    from wholebatch.cli.app import load

    [container] = resources["Job"]["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["torchrun"]
    for entry in container["env"]:
        monkeypatch.setenv(entry["name"], entry["value"])
    parsed = get_args_parser().parse_args(container["args"])
    assert (parsed.nnodes, parsed.nproc_per_node, parsed.max_restarts) == ("2", "8", 20)
    assert parsed.rdzv_backend == "c10d"
    assert parsed.rdzv_endpoint.startswith("wholebatch-train-0.")
    assert parsed.rdzv_conf == "join_timeout=1800"
    assert (parsed.module, parsed.training_script) == (True, "wholebatch.cli")
    command, *arguments = parsed.training_script_args
    options = load(command).parse(arguments)
    assert options["batch_size"] == 4096
    assert options["resume"]
    assert str(options["out"]).startswith(container["volumeMounts"][0]["mountPath"])
