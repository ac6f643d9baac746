"""config/deploy: what the files say fits the service and each other, and the service runs with as few rights."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import yaml

from ctr_pe import cli
from ctr_pe.serving.service_options import Connections
from tests.support.addresses import address_of
from tests.support.golden_folders import FOLDERS
from tests.support.processes import PATIENCE

USER = 10001


@pytest.fixture(scope="module")
def folder(checkout: Path) -> Path:
    return checkout / "config" / "deploy"


@pytest.fixture(scope="module")
def dockerfile(folder: Path) -> list[tuple[str, str]]:
    """Instruction and what follows, of the last stage; lines that go on are one."""
    text = re.sub(r"\\\n", " ", (folder / "Dockerfile").read_text(encoding="utf-8"))
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    found = [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines)]
    last = max(place for place, (word, _) in enumerate(found) if word == "FROM")
    return found[last:]


@pytest.fixture(scope="module")
def compose(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((folder / "compose.yaml").read_text(encoding="utf-8"))
    (service,) = found["services"].values()
    return dict(service)


@pytest.fixture(scope="module")
def kubernetes(folder: Path) -> dict[str, Any]:
    """Kind -> resource."""
    documents = list(yaml.safe_load_all((folder / "kubernetes.yaml").read_text(encoding="utf-8")))
    assert len({one["kind"] for one in documents}) == len(documents)
    return {one["kind"]: one for one in documents}


def only(given: list[tuple[str, str]], instruction: str) -> str:
    (found,) = [rest for word, rest in given if word == instruction]
    return found


def serve_arguments(words: list[str]) -> Any:
    """Of the command that a container starts, as its parser reads them."""
    assert words[:2] == ["ctr-pe", "serve"]
    return cli._parser().parse_args(words[1:])


def test_the_image_starts_the_service_as_a_user_without_rights(dockerfile: list[tuple[str, str]]) -> None:
    words = [*json.loads(only(dockerfile, "ENTRYPOINT")), *json.loads(only(dockerfile, "CMD"))]
    args = serve_arguments(words)
    assert str(args.port) == only(dockerfile, "EXPOSE")
    assert (args.host, str(args.model)) == ("0.0.0.0", "/models/current")
    assert only(dockerfile, "USER") == f"{USER}:{USER}"
    order = [word for word, _ in dockerfile]
    assert order.index("USER") > max(place for place, word in enumerate(order) if word in ("RUN", "COPY"))
    check = only(dockerfile, "HEALTHCHECK")
    assert f"http://127.0.0.1:{args.port}/live" in check
    compile(json.loads(check.partition("CMD")[2])[2], "HEALTHCHECK", "exec")


def test_the_image_is_built_of_what_is_there(folder: Path, checkout: Path) -> None:
    text = (folder / "Dockerfile").read_text(encoding="utf-8")
    assert re.search(r'pip install .*-c constraints\.txt .*"\.\[serve\]"', text)
    kept = [line[1:] for line in (folder / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")]
    assert {"setup.py", "pyproject.toml", "constraints.txt", "ctr_pe", "model_zoo", "config"} <= set(kept)
    for name in kept:
        assert (checkout / name).exists(), name
    setup = (checkout / "setup.py").read_text(encoding="utf-8")
    assert {"README.md"} == set(re.findall(r'HERE / "(\w+\.md)"', setup)) <= set(kept)
    for command in re.findall(r"^#   docker build -f (\S+)", text, re.MULTILINE):
        assert (checkout / command).is_file()


def test_compose_reads_alone_and_keeps_open_requests(
    compose: dict[str, Any], folder: Path, dockerfile: list[tuple[str, str]]
) -> None:
    args = serve_arguments([*json.loads(only(dockerfile, "ENTRYPOINT")), *compose["command"]])
    build = compose["build"]
    assert (folder / build["context"] / build["dockerfile"]).resolve() == folder / "Dockerfile"
    assert compose["read_only"] is True
    assert compose["user"] == f"{USER}:{USER}"
    assert (compose["cap_drop"], compose["security_opt"]) == (["ALL"], ["no-new-privileges:true"])
    (volume,) = compose["volumes"]
    assert volume.endswith(f":{args.model.parent}:ro")  # the parent: a new model takes the folder's name
    assert compose["ports"] == [f"127.0.0.1:{args.port}:{args.port}"]  # there is no password
    assert int(compose["stop_grace_period"].removesuffix("s")) > Connections().finish


def test_kubernetes_reads_alone_and_asks_what_the_service_answers(
    kubernetes: dict[str, Any], dockerfile: list[tuple[str, str]], folder: Path
) -> None:
    assert kubernetes.keys() == {"Deployment", "Service", "PodDisruptionBudget"}
    spec = kubernetes["Deployment"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    args = serve_arguments([*json.loads(only(dockerfile, "ENTRYPOINT")), *container["args"]])
    (port,) = container["ports"]
    assert port["containerPort"] == args.port
    (of_service,) = kubernetes["Service"]["spec"]["ports"]
    assert of_service["targetPort"] == port["name"]
    labels = spec["template"]["metadata"]["labels"]
    for selector in (
        spec["selector"]["matchLabels"],
        kubernetes["Service"]["spec"]["selector"],
        kubernetes["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
    assert kubernetes["PodDisruptionBudget"]["spec"]["minAvailable"] < spec["replicas"]
    of_pod, of_container = pod["securityContext"], container["securityContext"]
    assert (of_pod["runAsNonRoot"], of_pod["runAsUser"], of_pod["runAsGroup"]) == (True, USER, USER)
    assert of_container == {
        "readOnlyRootFilesystem": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    mounts = {one["mountPath"]: one for one in container["volumeMounts"]}
    assert mounts.keys() == {str(args.model.parent), "/tmp"}
    assert mounts[str(args.model.parent)]["readOnly"] is True
    assert {one["name"] for one in mounts.values()} == {one["name"] for one in pod["volumes"]}
    wait = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > Connections().finish + wait
    probes = {name: container[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startupProbe": "/live",
        "livenessProbe": "/live",
        "readinessProbe": "/ready",
    }
    assert {probe["port"] for probe in probes.values()} == {port["name"]}
    source = (Path(cli.__file__).parent / "serving" / "service.py").read_text(encoding="utf-8")
    scraped = spec["template"]["metadata"]["annotations"]["prometheus.io/path"]
    for path in {*(probe["path"] for probe in probes.values()), scraped}:
        assert f'@app.get("{path}")' in source
    for kind, of in container["resources"].items():
        assert {"cpu", "memory"} == of.keys(), kind


def test_kubernetes_fits_its_schema(kubernetes: dict[str, Any]) -> None:
    schemas = pytest.importorskip("kubernetes_validate")
    for resource in kubernetes.values():
        schemas.validate(resource, schemas.latest_version().rpartition(".")[0], strict=True)


IN_A_BOX = """
set -e
mount --make-rprivate /
mount -o remount,ro,bind /
mount -t tmpfs tmpfs "$TMPDIR"
cd "$TMPDIR"
test ! -w "$MODELS"
exec setpriv --reuid $USER_ID --regid $USER_ID --clear-groups --inh-caps=-all,+dac_read_search \
    --ambient-caps=-all,+dac_read_search --bounding-set=-all,+dac_read_search --no-new-privs "$@"
"""
"""A file system that is only read, with a folder in memory, and a user who may read all and write nothing: the
interpreter of the tests may lie in a home that is closed to others."""


def boxes() -> bool:
    """Whether this process may make such surroundings."""
    tools = all(map(shutil.which, ("unshare", "setpriv", "mount")))
    return tools and os.getuid() == 0 and subprocess.run(["unshare", "-m", "true"], check=False).returncode == 0


@pytest.mark.slow
def test_the_service_runs_without_rights_on_a_file_system_that_is_only_read(
    dockerfile: list[tuple[str, str]], checkout: Path, tmp_path: Path
) -> None:
    """The image's command and variables without the image."""
    if not boxes():
        pytest.skip("needs unshare, setpriv and the right to use them")
    shutil.copytree(FOLDERS / "din_cape" / "model", tmp_path / "models" / "current")
    (tmp_path / "tmp").mkdir()
    words = [*json.loads(only(dockerfile, "ENTRYPOINT")), *json.loads(only(dockerfile, "CMD"))]
    words = [str(tmp_path / one.lstrip("/")) if one.startswith("/models") else one for one in words]
    words[words.index("--port") + 1] = "0"
    set_by_image = [shlex.split(rest) for word, rest in dockerfile if word == "ENV"]
    variables = dict(pair.split("=", 1) for pairs in set_by_image for pair in pairs)
    temporary = str(tmp_path / "tmp")
    variables |= {"PATH": os.environ["PATH"], "PYTHONPATH": str(checkout), "HOME": temporary, "TMPDIR": temporary}
    variables |= {"MODELS": str(tmp_path / "models"), "USER_ID": str(USER)}
    command = ["unshare", "-m", "sh", "-c", IN_A_BOX, "sh", sys.executable, "-m", "ctr_pe.cli", *words[1:]]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=variables) as running:
        try:
            address, lines = address_of(running)
            assert json.loads(lines[-1])["level"]
            status = Path(f"/proc/{running.pid}/status").read_text(encoding="utf-8")
            assert re.search(rf"^Uid:\t{USER}\t{USER}\t{USER}\t{USER}$", status, re.MULTILINE)
            base, body = f"http://127.0.0.1:{address.rpartition(':')[2]}", {"history": [], "candidates": ["a"]}
            assert httpx.get(f"{base}/ready", timeout=PATIENCE).status_code == 200
            assert httpx.post(f"{base}/rank", json=body, timeout=PATIENCE).status_code == 200
            running.terminate()
            assert running.wait(PATIENCE) == 0
        finally:
            running.kill()
