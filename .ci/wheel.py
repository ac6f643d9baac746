"""What ``ctr_pe[serve]`` does from a wheel, where there is no compiler: python -P .ci/wheel.py README.md

Run in an empty folder by the Python that has the package. It runs README's first command, with short trainings, and its
code, and asks the service of the model that the code keeps; on Linux all of that with compiled kernels.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

SHORT = ("--repeats", "1", "--set", "epochs=1")


def command(*words: str) -> str:
    return subprocess.run(words, check=True, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True).stdout


def blocks(readme: Path, language: str) -> list[str]:
    text = readme.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def asked(address: str, method: str, path: str, body: object = None) -> object:
    """The service's answer. Raises AssertionError if it is not 200."""
    connection = http.client.HTTPConnection(address, timeout=60)
    content = {"content-type": "application/json"}
    connection.request(method, path, None if body is None else json.dumps(body), content)
    with connection.getresponse() as answer:
        text = answer.read().decode()
    assert answer.status == 200, f"{path}: {answer.status} {text}"
    return json.loads(text)


def check_kernels() -> None:
    """They are compiled, and one OpenMP library, torch's, has their threads."""
    facts = json.loads(command("ctr-pe", "info", "--json"))
    assert facts["C compiler"] == "none", facts
    if sys.platform == "linux":
        assert "none" not in facts["kernels from"], facts
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
        libraries = {line.split()[-1] for line in maps.splitlines() if "libgomp" in line}
        assert [Path(one).parents[1].name for one in libraries] == ["torch"], libraries


def check_service(model: Path) -> None:
    serve = ["ctr-pe", "serve", "--model", str(model), "--port", "0"]
    with subprocess.Popen(serve, stderr=subprocess.PIPE, text=True) as running:
        try:
            lines = iter(running.stderr or [])
            address = next(found[1] for line in lines if (found := re.search(r"http://([\d.]+:\d+)", line)))
            asked(address, "GET", "/ready")
            body = {"history": [3, 7], "times": [1_700_000_000, 1_700_000_600], "candidates": [5, 9, 11], "k": 2}
            ranked = asked(address, "POST", "/rank", body)
            assert isinstance(ranked, dict)
            assert len(ranked["ranked"]) == 2, ranked
            running.terminate()
            assert running.wait(30) == 0
        finally:
            running.kill()


def main(readme: Path) -> None:
    os.environ["PATH"] = str(Path(sys.executable).parent)
    first, (code,) = blocks(readme, "bash")[0], blocks(readme, "python")
    (benchmark,) = [line for line in first.splitlines() if line.startswith("ctr-pe ")]
    table = command(*benchmark.split(), *SHORT)
    assert re.search(r"^none .*\n^cape ", table, re.MULTILINE), table
    Path("readme.py").write_text(code, encoding="utf-8")
    runpy.run_path("readme.py")
    check_kernels()
    check_service(Path("model"))
    print("the wheel does what README says")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
