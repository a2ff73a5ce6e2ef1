"""docs/operations.md and docs/deploy/ name what there is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from deltastore import errors
from receiver.cli import run
from receiver.config import Settings, read_settings
from receiver.metrics import Metrics

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
DEPLOY = ROOT / "docs" / "deploy"


def metric_names():
    text = Metrics().text().decode()
    return {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE") and "_created" not in line}


def test_every_metric_is_in_the_table_and_every_one_there_exists():
    told = set(re.findall(r"`(receiver_[a-z_]+)", PAGE))
    assert told == metric_names()


def test_every_setting_has_a_row_with_its_flag_and_variable():
    variables = {parameter.name: parameter.envvar for parameter in run.command.params}
    for name in Settings.__struct_fields__:
        written = name.replace("_", "-")
        row = next(line for line in PAGE.splitlines() if re.match(rf"\| `\[?{written}\]?` ", line))
        assert f"`{variables[{'cache_size': 'cache_bytes'}.get(name, name)]}`" in row


def test_every_kind_of_error_is_in_the_runbook():
    runbook = PAGE.partition("## Runbook")[2]
    kinds = {value.kind for value in vars(errors).values() if isinstance(value, type)} - {"error"}
    assert {kind for kind in kinds if f"`{kind}`" not in runbook} == set()


def test_every_event_is_in_the_table():
    events = {"log"}
    for path in (ROOT / "receiver").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "tell":
                events.add(ast.literal_eval(node.args[0]))
    table = PAGE.partition("## The log")[2].partition("## Runbook")[0]
    assert set(re.findall(r"^\| `([a-z-]+)` \|", table, re.MULTILINE)) == events


def test_every_link_leads_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (ROOT / "docs" / target).exists(), target


def test_the_example_settings_are_settings(tmp_path):
    assert read_settings(DEPLOY / "receiver.toml")["group"] == "rack-7"
    manifest = (DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8")
    inner = manifest.partition("receiver.toml: |\n")[2].partition("---")[0]
    path = tmp_path / "receiver.toml"
    path.write_text("\n".join(line.strip() for line in inner.splitlines()))
    assert read_settings(path)["listen"] == "0.0.0.0:9310"


def test_the_manifests_are_yaml_and_ask_for_metrics_that_there_are():
    yaml = pytest.importorskip("yaml")
    rules = yaml.safe_load((DEPLOY / "alerts.yaml").read_text(encoding="utf-8"))["groups"][0]["rules"]
    asked = {name for rule in rules for name in re.findall(r"receiver_[a-z_]+", rule["expr"])}
    assert {name.removesuffix("_total") for name in asked} <= {name.removesuffix("_total") for name in metric_names()}
    _, deployment = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8"))
    pod = deployment["spec"]["template"]["spec"]
    flags = {option for parameter in run.command.params for option in parameter.opts}
    for container in (*pod["initContainers"], pod["containers"][0]):
        assert {word for word in container["args"] if word.startswith("--")} <= flags
    volumes = {volume["name"] for volume in pod["volumes"]}
    containers = [*pod["initContainers"], *pod["containers"]]
    assert {mount["name"] for one in containers for mount in one["volumeMounts"]} == volumes
