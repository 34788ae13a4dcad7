"""Configuration that documents itself, and plug-in tables that hold what they say."""

import dataclasses
import importlib
import pkgutil
from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

import triptych
from tests.arch.test_folders import PARTS, ROOT
from triptych.cli.config import all_settings, field_docstrings
from triptych.cli.serving.serve_file import DEFAULT, read_serve_file
from triptych.core import config
from triptych.core.registry import Registry

CONFIG_CLASSES = [
    value
    for value in vars(config).values()
    if isinstance(value, type) and dataclasses.is_dataclass(value)
]
LAYER = {part: at for at, part in enumerate(PARTS)}
TABLE_FILES = ("plugins", "policy")
"""Modules of a part that may hold a plug-in table."""


def plugin_tables() -> list[tuple[str, Registry[Any]]]:
    """Every ``Registry`` of a module of ``TABLE_FILES``, or of a package."""
    found = dict[int, tuple[str, Registry[Any]]]()
    for part in PARTS:
        package = importlib.import_module(f"triptych.{part}")
        names = [info.name for info in pkgutil.iter_modules(package.__path__)]
        modules = [package.__name__]
        modules += [f"triptych.{part}.{name}" for name in names if name in TABLE_FILES]
        for module in modules:
            for value in vars(importlib.import_module(module)).values():
                if isinstance(value, Registry):
                    found.setdefault(id(value), (part, value))
    return list(found.values())


TABLES = plugin_tables()


def test_the_namespace_has_no_module_of_its_own() -> None:
    assert getattr(triptych, "__file__", None) is None


@pytest.mark.parametrize("cls", CONFIG_CLASSES, ids=lambda cls: cls.__name__)
def test_every_setting_has_a_docstring_and_a_default(cls: type) -> None:
    documented = field_docstrings(cls)
    for field in dataclasses.fields(cls):
        assert documented.get(field.name), f"{cls.__name__}.{field.name} has no docstring"
        assert (field.default, field.default_factory) != (dataclasses.MISSING, dataclasses.MISSING)


def test_explained_settings_are_those_that_the_config_takes() -> None:
    nested: dict[str, Any] = {}
    for setting in all_settings(config.AppConfig):
        *path, last = setting.key.split(".")
        place = nested
        for part in path:
            place = place.setdefault(part, {})
        place[last] = setting.default
    assert config.AppConfig.from_mapping(nested) == config.AppConfig()


def test_there_are_plugin_tables() -> None:
    assert "batch_policies" in {table.kind for _, table in TABLES}


@pytest.mark.parametrize(("part", "table"), TABLES, ids=lambda value: getattr(value, "kind", value))
def test_every_plugin_loads_and_comes_from_no_higher_layer(part: str, table: Registry[Any]) -> None:
    for name, target in table.builtin.items():
        assert callable(table.load(name))
        assert LAYER[target.split(".")[1]] <= LAYER[part]


def test_the_serve_file_is_what_ray_serve_takes() -> None:
    body = yaml.safe_load((ROOT / "config.yaml").read_text(encoding="utf-8"))
    ServeDeploySchema.model_validate(body)
    ServeDeploySchema.model_validate(DEFAULT)


def test_the_serve_file_states_the_defaults_that_it_shows() -> None:
    (app,) = read_serve_file(ROOT / "config.yaml")
    assert app.config == config.AppConfig()
