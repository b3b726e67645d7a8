"""What stands in deploy/ asks for metrics that exist, and its rules are what Prometheus accepts."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import yaml
from fetch_debian_program import fetch

from dspark_trt.serving import metric_families

REPOSITORY = Path(__file__).parents[2]
DEPLOY = REPOSITORY / "deploy"
EXPORTED = set(re.findall(r'"(dspark_\w+)"', Path(metric_families.__file__).read_text()))


def asked_for(expression: str) -> set[str]:
    """Metrics of an expression, the parts of histograms by the name of the whole."""
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"\bdspark_\w+", expression)}


def test_dashboard_shows_every_metric_and_no_other() -> None:
    dashboard = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    shown = set().union(*map(asked_for, expressions))
    assert shown <= EXPORTED
    assert EXPORTED - shown == {"dspark_request_steps_without_drafts_total"}
    for panel in dashboard["panels"]:
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]


def test_alert_rules_ask_for_metrics_that_exist_and_say_what_to_do() -> None:
    (group,) = yaml.safe_load((DEPLOY / "prometheus-alerts.yml").read_text())["groups"]
    for rule in group["rules"]:
        assert asked_for(rule["expr"]) <= EXPORTED
        assert rule["annotations"].keys() == {"summary", "description"}


def test_prometheus_accepts_rules_and_the_expressions_of_the_dashboard(tmp_path: Path) -> None:
    promtool = fetch("promtool", REPOSITORY / "build" / "downloads")
    subprocess.run([promtool, "check", "rules", DEPLOY / "prometheus-alerts.yml"], check=True)
    dashboard = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    rules = [
        {"record": f"panel:{index}", "expr": expression.replace("$__rate_interval", "1m")}
        for index, expression in enumerate(expressions)
    ]
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    subprocess.run([promtool, "check", "rules", path], check=True)
