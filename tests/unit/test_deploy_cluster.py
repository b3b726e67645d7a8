"""The examples for Kubernetes, KServe and nginx: what their own checkers accept, and what this package has."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from fetch_debian_program import fetch

from dspark_trt.server.arguments import EXIT_MARGIN_S
from dspark_trt.server.openai import app as front_end
from dspark_trt.serving import metric_families
from tests.support.nginx import configured

REPOSITORY = Path(__file__).parents[2]
DEPLOY = REPOSITORY / "deploy"
ROUTES = set(re.findall(r'@app\.get\("([^"]+)"\)', Path(front_end.__file__).read_text()))
OPTIONS = set(json.loads((Path(__file__).parent / "cli_surface.json").read_text())["serve"])
OF_KSERVE = {"minReplicas"}  # of a predictor, beside what a pod has
QUEUE = "dspark_requests_waiting"


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def of_kind(kind: str) -> list[dict[str, Any]]:
    return [document for document in documents("kubernetes.yaml") if document["kind"] == kind]


def pods() -> dict[str, dict[str, Any]]:
    """The specifications of pods in both examples."""
    (deployment,), (kserve,) = of_kind("Deployment"), documents("kserve.yaml")
    predictor = {name: value for name, value in kserve["spec"]["predictor"].items() if name not in OF_KSERVE}
    return {"kubernetes": deployment["spec"]["template"]["spec"], "kserve": predictor}


def check(document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def test_kubernetes_accepts_every_object() -> None:
    kinds = [document["kind"] for document in documents("kubernetes.yaml")]
    scaled = ["PodDisruptionBudget", "HorizontalPodAutoscaler"]
    assert kinds == ["Deployment", "NetworkPolicy", "Service", "Service", *scaled]
    for document in documents("kubernetes.yaml"):
        check(document)
    check({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "dspark"}, "spec": pods()["kserve"]})
    (kserve,) = documents("kserve.yaml")
    assert (kserve["apiVersion"], kserve["kind"]) == ("serving.kserve.io/v1beta1", "InferenceService")


@pytest.mark.parametrize("example", ["kubernetes", "kserve"])
def test_container_calls_serve_with_options_that_it_has_and_asks_routes_that_there_are(example: str) -> None:
    (container,) = pods()[example]["containers"]
    command, folder, *arguments = container["args"]
    assert command == "serve"
    options = dict(zip(arguments[::2], arguments[1::2], strict=True))
    assert options.keys() <= OPTIONS
    assert options["--address"] == "0.0.0.0"
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    port = int(options["--openai-port"])
    assert port in ports.values()
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = container.get(probe, {}).get("httpGet")
        assert asked is None or (asked["path"] in ROUTES and ports.get(asked["port"], asked["port"]) == port)
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts["shared-memory"] == "/dev/shm"
    assert folder == "/mnt/models" or folder == mounts["build"]


@pytest.mark.parametrize("example", ["kubernetes", "kserve"])
def test_pod_has_no_rights(example: str) -> None:
    pod = pods()[example]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    writable = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
    assert writable == {"/dev/shm", "/tmp"}


def test_pod_can_call_nobody() -> None:
    (policy,), (deployment,) = of_kind("NetworkPolicy"), of_kind("Deployment")
    assert policy["spec"]["podSelector"] == deployment["spec"]["selector"]
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert policy["spec"]["egress"] == []


def test_pod_has_time_to_drain_and_services_and_scaler_name_what_is_there() -> None:
    (deployment,), (scaler,) = of_kind("Deployment"), of_kind("HorizontalPodAutoscaler")
    pod = deployment["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    arguments = container["args"]
    drain_s = float(arguments[arguments.index("--drain-time") + 1])
    pause_s = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["spec"]["terminationGracePeriodSeconds"] > pause_s + drain_s + EXIT_MARGIN_S
    ports = {port["name"] for port in container["ports"]}
    for service in of_kind("Service"):
        assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    assert pod["metadata"]["annotations"]["prometheus.io/path"] in ROUTES
    assert scaler["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    (metric,) = scaler["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == QUEUE


def test_adapter_hands_on_the_metric_that_the_scaler_asks_for() -> None:
    (adapter,) = documents("prometheus-adapter.yaml")
    (rule,) = adapter["rules"]["custom"]
    assert rule["seriesQuery"].startswith(QUEUE + "{")
    assert re.fullmatch(rule["name"]["matches"], QUEUE)
    assert rule["name"]["as"] == QUEUE
    assert f'"{QUEUE}"' in Path(metric_families.__file__).read_text()


def test_nginx_accepts_its_configuration(tmp_path: Path) -> None:
    nginx = fetch("nginx", REPOSITORY / "build" / "downloads")
    path = configured(DEPLOY / "nginx.conf", tmp_path, {"dspark-0": "127.0.0.1", "dspark-1": "127.0.0.1"})
    said = subprocess.run([nginx, "-t", "-p", tmp_path, "-c", path], capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
