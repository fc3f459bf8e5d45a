"""Ray settings, and the options of deployments and actors that result from them. Needs no Ray."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

import penstock.ray
from penstock.cli import cli
from penstock.config import PipelineConfig
from penstock.errors import ConfigError, MissingDependencyError, UnsupportedFeatureError
from penstock.ray import cluster
from penstock.ray.config import RayConfig
from penstock.ray.deployment import (
    Resources,
    check_supported,
    engine_options,
    ingress_options,
    max_outstanding,
    replica_config,
    usable_cpus,
)
from penstock.serve.config import ServeConfig

SERVE_CONFIG = ServeConfig(shutdown_grace=45.0)


def make_deployment_options(ray: RayConfig, **settings: object) -> dict[str, object]:
    config = PipelineConfig.from_flat({"model_path": "demo", **settings})
    return engine_options(config, SERVE_CONFIG, ray, Resources.of(config, ray))


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "find_spec", lambda name: None)


def test_settings_are_validated() -> None:
    assert RayConfig(ray_min_replicas=3).max_replicas == 3
    with pytest.raises(ConfigError, match=r"ray_max_replicas: must be at least ray_min_replicas, 3, was 2"):
        RayConfig(ray_min_replicas=3, ray_max_replicas=2)
    for name, value in {"ray_cpus": 0, "ray_target_requests": 0.0, "ray_app_name": "a/b"}.items():
        with pytest.raises(ConfigError, match=name):
            RayConfig(**{name: value})  # type: ignore[arg-type]


def test_the_number_of_replicas_is_fixed_or_autoscaled() -> None:
    assert make_deployment_options(RayConfig(ray_min_replicas=2))["num_replicas"] == 2
    autoscaled_options = make_deployment_options(RayConfig(ray_max_replicas=5, ray_target_requests=3))
    assert "num_replicas" not in autoscaled_options
    assert autoscaled_options["autoscaling_config"] == {
        "min_replicas": 1,
        "max_replicas": 5,
        "target_ongoing_requests": 3.0,
    }


def test_the_shutdown_grace_is_the_limit_for_draining() -> None:
    deployment_options = (
        make_deployment_options(RayConfig()),
        ingress_options(SERVE_CONFIG, RayConfig(ray_ingress_replicas=2)),
    )
    assert [options["graceful_shutdown_timeout_s"] for options in deployment_options] == [45.0, 45.0]
    assert deployment_options[1]["num_replicas"] == 2
    assert deployment_options[1]["ray_actor_options"] == {"num_cpus": 0}


def test_a_tensor_parallel_model_is_one_bundle_on_one_node() -> None:
    ray = RayConfig(ray_cpus=8)
    options = make_deployment_options(ray, tensor_parallel_size=2)
    assert options["placement_group_bundles"] == [{"CPU": 8}]
    assert options["placement_group_strategy"] == "STRICT_PACK"
    assert "placement_group_bundles" not in make_deployment_options(ray)
    gpu_options = make_deployment_options(RayConfig(), tensor_parallel_size=2, devices="gpu:2,3")
    assert gpu_options["placement_group_bundles"] == [{"CPU": 2, "GPU": 2}]
    assert gpu_options["ray_actor_options"] == {"num_cpus": 2, "num_gpus": 2}
    with pytest.raises(ConfigError, match="ray_cpus: must be at least tensor_parallel_size, 2, was 1"):
        make_deployment_options(RayConfig(ray_cpus=1), tensor_parallel_size=2)


def test_options_set_the_cpus_and_threads_of_a_replica() -> None:
    def compute_cpus_and_threads(ray: RayConfig, **settings: object) -> tuple[int, int | None]:
        config = PipelineConfig.from_flat({"model_path": "demo", **settings})
        resources = Resources.of(config, ray)
        return resources.num_cpus, replica_config(config, resources).num_threads

    assert compute_cpus_and_threads(RayConfig(ray_cpus=3)) == (3, 3)
    assert compute_cpus_and_threads(RayConfig(ray_cpus=3), num_threads=2) == (3, 2)
    assert compute_cpus_and_threads(RayConfig(), num_threads=2) == (2, 2)
    assert compute_cpus_and_threads(RayConfig()) == (usable_cpus(), usable_cpus())
    assert compute_cpus_and_threads(RayConfig(ray_min_replicas=1000)) == (1, 1)
    assert compute_cpus_and_threads(RayConfig(), devices="gpu:1") == (1, None)


def test_the_gpus_of_a_replica_are_numbered_from_0() -> None:
    config = PipelineConfig.from_flat({"model_path": "demo", "devices": "gpu:2,3"})
    replica = replica_config(config, Resources.of(config, RayConfig()))
    assert [str(device) for device in replica.model.devices] == ["gpu:0", "gpu:1"]


def test_max_outstanding_is_the_capacity_of_replicas_and_queue() -> None:
    ray = RayConfig(ray_max_replicas=3, ray_max_requests=10)
    assert max_outstanding(ServeConfig(max_queue_size=7), ray) == 37
    assert max_outstanding(ServeConfig(), ray) == 30 + 64


@pytest.mark.parametrize(
    ("name", "value"),
    [("state_dir", "x"), ("cache_events", "tcp://127.0.0.1:1"), ("profile_dir", "x"), ("model_memory", 9)],
)
def test_settings_of_a_single_process_server_are_refused(name: str, value: object) -> None:
    check_supported(ServeConfig())
    with pytest.raises(UnsupportedFeatureError, match=f"--{name.replace('_', '-')} with --ray"):
        check_supported(ServeConfig(**{name: value}))


@pytest.mark.usefixtures("no_ray")
def test_without_ray_the_error_names_the_extra_and_the_output_file_is_unchanged(tmp_path: Path) -> None:
    requests = tmp_path / "in.jsonl"
    requests.write_text("")
    output = tmp_path / "out.jsonl"
    output.write_text("unchanged")
    for command, arguments in {
        "serve": ["demo"],
        "batch run": [str(requests), "-o", str(output), "demo", "--overwrite"],
    }.items():
        result = CliRunner().invoke(cli, [*command.split(), *arguments, "--ray"])
        assert result.exit_code == 2
        expected = f"penstock: error: penstock {command} --ray needs ray: pip install 'penstock-llm[ray]'"
        assert result.stderr.strip() == expected
    assert output.read_text() == "unchanged"
    with pytest.raises(MissingDependencyError, match=r"penstock\.ray\.build_app needs ray: .*\[ray\]"):
        penstock.ray.build_app({"model_path": "demo"})
    for name in ("generate", "embed"):
        with pytest.raises(MissingDependencyError, match=rf"penstock\.ray\.{name} needs ray"):
            getattr(penstock.ray, name)(None, "demo")


def test_settings_come_from_flags_and_the_environment_and_are_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PENSTOCK_RAY_MAX_REQUESTS", "5")
    arguments = ["serve", "demo", "--ray", "--ray-min-replicas", "2", "--print-config"]
    printed_rows = {
        line.split()[0]: line.split()[1:] for line in CliRunner().invoke(cli, arguments).stdout.splitlines()
    }
    assert printed_rows["ray_min_replicas"] == ["2", "flag"]
    assert printed_rows["ray_max_requests"] == ["5", "environment", "PENSTOCK_RAY_MAX_REQUESTS"]
    invalid_result = CliRunner().invoke(cli, ["batch", "run", __file__, "-o", "x", "demo", "--ray-cpus", "0"])
    assert invalid_result.exit_code == 2
    assert "ray_cpus: must be a whole number of at least 1" in invalid_result.stderr


def test_several_models_on_ray_are_refused() -> None:
    result = CliRunner().invoke(cli, ["serve", "--ray", "--model", "demo", "--model", "demo"])
    assert result.exit_code == 2
    assert "--ray with 2 models is not supported" in result.stderr
