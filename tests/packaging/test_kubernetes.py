"""The Kubernetes manifests: their schema, and what they say about the server."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.serving import make_services

from penstock.cli.serve import command
from penstock.serve.app import create_app
from penstock.serve.http.middleware import PROBES
from penstock.serve.observability.metrics import ENGINE_METRICS

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "packaging" / "kubernetes"
MANIFESTS = {path.stem: yaml.safe_load(path.read_text()) for path in FOLDER.glob("*.yaml")}


def container() -> dict[str, Any]:
    (found,) = MANIFESTS["deployment"]["spec"]["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def test_the_kustomization_lists_all_manifests() -> None:
    listed = {name.removesuffix(".yaml") for name in MANIFESTS["kustomization"]["resources"]}
    assert listed == MANIFESTS.keys() - {"kustomization"}


@pytest.mark.parametrize("name", sorted(MANIFESTS.keys() - {"kustomization"}))
def test_schemas(name: str) -> None:
    validator = pytest.importorskip("kubernetes_validate")
    version = validator.latest_version()
    validator.validate(MANIFESTS[name], version, strict=True)
    broken = {**MANIFESTS[name], "specs": {}}
    with pytest.raises(Exception, match="specs"):
        validator.validate(broken, version, strict=True)


def test_the_flags_are_those_of_the_server() -> None:
    known = {flag: option for option in command.params for flag in option.opts}
    args = container()["args"]
    flags = [arg for arg in args if arg.startswith("--")]
    assert flags
    assert set(flags) <= known.keys()
    grace = float(args[args.index("--shutdown-grace") + 1])
    pod = MANIFESTS["deployment"]["spec"]["template"]["spec"]
    assert grace < pod["terminationGracePeriodSeconds"]


def test_the_probes_are_open_routes() -> None:
    paths = create_app(make_services()).openapi()["paths"]
    for kind, path in {
        "startupProbe": "/health",
        "livenessProbe": "/health",
        "readinessProbe": "/ready",
    }.items():
        probe = container()[kind]["httpGet"]
        assert (probe["path"], probe["port"]) == (path, "http")
        assert path in paths
        assert path in PROBES


def test_ports_users_and_selectors_agree() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    (port,) = container()["ports"]
    assert f"EXPOSE {port['containerPort']}" in dockerfile
    pod = MANIFESTS["deployment"]["spec"]["template"]
    found = re.search(r"--uid (\d+)", dockerfile)
    assert found is not None
    assert pod["spec"]["securityContext"]["runAsUser"] == int(found[1])
    assert pod["metadata"]["annotations"]["prometheus.io/port"] == str(port["containerPort"])
    labels = pod["metadata"]["labels"]
    assert MANIFESTS["deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert MANIFESTS["service"]["spec"]["selector"] == labels
    assert MANIFESTS["service"]["spec"]["ports"][0]["targetPort"] == port["name"]
    assert "penstock" not in MANIFESTS["service"]["metadata"]["name"]


def test_the_autoscaler_reads_a_gauge_of_the_server() -> None:
    spec = MANIFESTS["hpa"]["spec"]
    assert spec["scaleTargetRef"]["name"] == MANIFESTS["deployment"]["metadata"]["name"]
    (metric,) = spec["metrics"]
    assert metric["pods"]["metric"]["name"] in {one.name for one in ENGINE_METRICS}
