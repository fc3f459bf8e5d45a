"""Settings of the server."""

from __future__ import annotations

import pytest

from penstock.config import PipelineConfig, config_fields
from penstock.errors import ConfigError
from penstock.ray.config import ray_fields
from penstock.serve.config import ServeConfig, serve_fields


def test_setting_names_are_unique() -> None:
    names = [field.name for field in (*serve_fields(), *ray_fields(), *config_fields())]
    assert len(names) == len(set(names))


def test_flags_precede_environment_variables() -> None:
    environment = {"PENSTOCK_PORT": "1", "PENSTOCK_HOST": "::1", "PENSTOCK_API_KEY": " a , b,"}
    config = ServeConfig.from_flat({"port": 2}, "flag", environment=environment)
    assert (config.port, config.host, config.api_key) == (2, "::1", ("a", "b"))
    assert config.sources == {
        "port": "flag",
        "host": "environment PENSTOCK_HOST",
        "api_key": "environment PENSTOCK_API_KEY",
    }


def test_api_keys_are_not_in_descriptions_and_errors() -> None:
    config = ServeConfig(api_key=("hidden",))
    assert "hidden" not in repr(config.describe())
    for invalid in (("hidden key",), "hidden key", ("hidden", ""), ("hidden", 1), 5):
        with pytest.raises(ConfigError, match="api_key: must be") as exc_info:
            ServeConfig.from_flat({"api_key": invalid})
        assert "hidden" not in str(exc_info.value)


def test_list_items_with_commas_are_not_split() -> None:
    assert ServeConfig.from_flat({"api_key": ["a,b", "c"]}).api_key == ("a,b", "c")


@pytest.mark.parametrize("name", ["prot", "max_queue", "api_keys"])
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="did you mean"):
        ServeConfig.from_flat({name: 1})


def test_each_configuration_takes_its_own_settings() -> None:
    settings = {"port": (1, "flag"), "max_length": (2, "file x")}
    assert ServeConfig.from_given(settings).sources == {"port": "flag"}
    assert PipelineConfig.from_given(settings).sources == {"max_length": "file x"}
