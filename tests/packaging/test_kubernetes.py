"""The Kubernetes manifests: schema, and settings of the server."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.app_client import make_services

from penstock.cli.serve import command
from penstock.config import PipelineConfig, config_fields
from penstock.config.sources import collect_values
from penstock.ray.config import RayConfig, ray_fields
from penstock.ray.deployment import Resources, check_supported
from penstock.serve.app import create_app
from penstock.serve.config import ServeConfig, serve_fields
from penstock.serve.http.middleware import PROBE_PATHS
from penstock.serve.observability.metrics import ENGINE_METRICS

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "packaging" / "kubernetes"
MANIFESTS = {path.stem: yaml.safe_load(path.read_text()) for path in FOLDER.glob("*.yaml")}
NOT_IN_KUSTOMIZATION = {"kustomization", "rayservice"}  # a RayService replaces the other manifests


def server_container() -> dict[str, Any]:
    (container,) = MANIFESTS["deployment"]["spec"]["template"]["spec"]["containers"]
    assert isinstance(container, dict)
    return container


def test_the_kustomization_lists_all_manifests_except_the_ray_service() -> None:
    listed_names = {name.removesuffix(".yaml") for name in MANIFESTS["kustomization"]["resources"]}
    assert listed_names == MANIFESTS.keys() - NOT_IN_KUSTOMIZATION


@pytest.mark.parametrize("name", sorted(MANIFESTS.keys() - NOT_IN_KUSTOMIZATION))
def test_manifests_follow_the_kubernetes_schema(name: str) -> None:
    validator = pytest.importorskip("kubernetes_validate")
    version = validator.latest_version()
    validator.validate(MANIFESTS[name], version, strict=True)
    invalid_manifest = {**MANIFESTS[name], "specs": {}}
    with pytest.raises(Exception, match="specs"):
        validator.validate(invalid_manifest, version, strict=True)


def test_the_flags_of_the_container_are_server_flags_and_shutdown_fits_the_grace_period() -> None:
    known_names = {flag: option for option in command.params for flag in option.opts}
    args = server_container()["args"]
    flags = [arg for arg in args if arg.startswith("--")]
    assert flags
    assert set(flags) <= known_names.keys()
    shutdown_grace = float(args[args.index("--shutdown-grace") + 1])
    pod = MANIFESTS["deployment"]["spec"]["template"]["spec"]
    assert shutdown_grace < pod["terminationGracePeriodSeconds"]


def test_the_probes_are_routes_without_authentication() -> None:
    paths = create_app(make_services()).openapi()["paths"]
    for probe_name, path in {
        "startupProbe": "/health",
        "livenessProbe": "/health",
        "readinessProbe": "/ready",
    }.items():
        probe = server_container()[probe_name]["httpGet"]
        assert (probe["path"], probe["port"]) == (path, "http")
        assert path in paths
        assert path in PROBE_PATHS


def test_ports_users_and_selectors_agree() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    (port,) = server_container()["ports"]
    assert f"EXPOSE {port['containerPort']}" in dockerfile
    pod = MANIFESTS["deployment"]["spec"]["template"]
    uid = re.search(r"--uid (\d+)", dockerfile)
    assert uid is not None
    assert pod["spec"]["securityContext"]["runAsUser"] == int(uid[1])
    assert pod["metadata"]["annotations"]["prometheus.io/port"] == str(port["containerPort"])
    labels = pod["metadata"]["labels"]
    assert MANIFESTS["deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert MANIFESTS["service"]["spec"]["selector"] == labels
    assert MANIFESTS["service"]["spec"]["ports"][0]["targetPort"] == port["name"]
    assert "penstock" not in MANIFESTS["service"]["metadata"]["name"]


def test_the_autoscaler_scales_the_deployment_by_an_engine_metric() -> None:
    spec = MANIFESTS["hpa"]["spec"]
    assert spec["scaleTargetRef"]["name"] == MANIFESTS["deployment"]["metadata"]["name"]
    (metric,) = spec["metrics"]
    name = metric["pods"]["metric"]["name"]
    assert name in {metric.name for metric in ENGINE_METRICS}
    assert not name.endswith("_total"), "the autoscaler needs a gauge"


# -- KubeRay ---------------------------------------------------------------------------------------------

RAY_SERVICE = MANIFESTS["rayservice"]["spec"]
RAY_CLUSTER = RAY_SERVICE["rayClusterConfig"]
(APPLICATION,) = yaml.safe_load(RAY_SERVICE["serveConfigV2"])["applications"]
NODE_GROUPS = {"head": RAY_CLUSTER["headGroupSpec"], "worker": RAY_CLUSTER["workerGroupSpecs"][0]}


@pytest.mark.parametrize("name", NODE_GROUPS)
def test_pod_templates_of_the_ray_cluster_follow_the_schema(name: str) -> None:
    """The validator has no schema for RayService, so each pod template of the manifest is validated."""
    validator = pytest.importorskip("kubernetes_validate")
    template = NODE_GROUPS[name]["template"]
    pod_template = {
        "apiVersion": "v1",
        "kind": "PodTemplate",
        "metadata": {"name": name},
        "template": template,
    }
    validator.validate(pod_template, validator.latest_version(), strict=True)
    invalid_manifest = {**pod_template, "template": {**template, "specs": {}}}
    with pytest.raises(Exception, match="specs"):
        validator.validate(invalid_manifest, validator.latest_version(), strict=True)


def test_the_arguments_of_the_ray_application_are_settings_that_fit_the_worker_pods() -> None:
    module, _, function = APPLICATION["import_path"].partition(":")
    assert function in import_module(module).__all__
    fields = [*config_fields(), *serve_fields(), *ray_fields()]
    values = collect_values(fields, APPLICATION["args"], "flag", {})
    pipeline, serve, ray = (cls.from_given(values) for cls in (PipelineConfig, ServeConfig, RayConfig))
    check_supported(serve)
    worker = NODE_GROUPS["worker"]
    (container,) = worker["template"]["spec"]["containers"]
    cpus = int(container["resources"]["limits"]["cpu"])
    assert Resources.of(pipeline, ray).num_cpus <= cpus
    num_engines_per_pod = cpus // Resources.of(pipeline, ray).num_cpus
    assert worker["maxReplicas"] * num_engines_per_pod >= ray.max_replicas
    assert worker["minReplicas"] * num_engines_per_pod >= ray.ray_min_replicas
    assert serve.shutdown_grace < worker["template"]["spec"]["terminationGracePeriodSeconds"]


def test_the_ray_cluster_serves_at_the_port_of_the_image() -> None:
    (head,) = NODE_GROUPS["head"]["template"]["spec"]["containers"]
    (port,) = [port["containerPort"] for port in head["ports"] if port["name"] == "serve"]
    assert yaml.safe_load(RAY_SERVICE["serveConfigV2"])["http_options"]["port"] == port
    assert f"EXPOSE {port}" in (ROOT / "Dockerfile").read_text()
    shell = {group["template"]["spec"]["containers"][0]["command"][1] for group in NODE_GROUPS.values()}
    assert shell == {"-c"}
    assert MANIFESTS["rayservice"]["metadata"]["annotations"]["ray.io/overwrite-container-cmd"] == "true"


@pytest.mark.peers
def test_ray_accepts_the_serve_configuration() -> None:
    schema = pytest.importorskip("ray.serve.schema", reason="Ray is not installed: pip install '.[ray]'")
    config = schema.ServeDeploySchema(**yaml.safe_load(RAY_SERVICE["serveConfigV2"]))
    assert config.applications[0].args["model_path"] == "demo"
