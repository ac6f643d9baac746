"""What is installed: ctr_pe with its models and configurations, and nothing that is somebody else's."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Mapping
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.metadata import files, requires
from pathlib import Path
from typing import Any

import pytest
import yaml

import ctr_pe
from ctr_pe import cli

PUBLIC = [
    *("CTRRanker", "Chain", "NextItemRanker", "PositionEncoding", "Positions", "available_pes", "build_pe", "load"),
    "units",
]


def copy_checkout(checkout: Path, to: Path) -> Path:
    """The sources without what earlier builds left beside them: setuptools takes build/lib into the wheel as it is."""
    keep = ("ctr_pe", "model_zoo", "config", "setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE", "README.md")
    to.mkdir()
    for name in keep:
        if (checkout / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.so")
            shutil.copytree(checkout / name, to / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(checkout / name, to)
    return to


def build(source: Path, out: Path, *options: str, env: Mapping[str, str] | None = None) -> None:
    command = [sys.executable, "-m", "build", "--no-isolation", *options, "--outdir", str(out), str(source)]
    built = subprocess.run(command, capture_output=True, text=True, env=env)
    assert built.returncode == 0, built.stdout + built.stderr


@pytest.fixture(scope="session")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built by way of the source distribution: what is missing there is missing in the wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    build(copy_checkout(checkout, folder / "source"), folder / "dist")
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel


@pytest.fixture(scope="session")
def released(wheel: Path, checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a release, as cibuildwheel makes it of the one that is built."""
    if not all(map(shutil.which, ("cc", "auditwheel", "patchelf"))):
        pytest.skip("needs a C compiler, auditwheel and patchelf")
    folder = tmp_path_factory.mktemp("released")
    settings = tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["cibuildwheel"]
    command = settings["linux"]["repair-wheel-command"].format(dest_dir=folder, wheel=wheel)
    repaired = subprocess.run(shlex.split(command), capture_output=True, text=True, check=False)
    assert repaired.returncode == 0, repaired.stdout + repaired.stderr
    (wheel,) = folder.iterdir()
    return wheel


def installed_as(checkout: Path) -> set[str]:
    """Every module and YAML file of the checkout under the name it must have once installed."""
    homes = {"ctr_pe": "ctr_pe", "model_zoo": "ctr_pe/model_zoo", "config": "ctr_pe/configs"}
    return {
        f"{home}/{file.relative_to(checkout / folder).as_posix()}"
        for folder, home in homes.items()
        for pattern in ("*.py", "*.yaml", "py.typed", "template/*")
        for file in (checkout / folder).rglob(pattern)
    }


def fuxictrs_modules() -> set[str]:
    """Modules of the top-level ``model_zoo`` that comes with fuxictr."""
    names = {str(file) for file in files("fuxictr") or []}
    return {name for name in names if name.startswith("model_zoo/") and name.endswith(".py")}


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path, checkout: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    info = f"ctr_pe-{ctr_pe.__version__}.dist-info/"
    compiled = {name for name in names if name.endswith(".so")}  # where there is a compiler
    assert compiled <= {f"ctr_pe/ops/_kernels{suffix}" for suffix in EXTENSION_SUFFIXES}
    assert {name for name in names - compiled if not name.startswith(info)} == installed_as(checkout)
    assert f"{info}licenses/LICENSE" in names
    assert zipfile.ZipFile(wheel).read(f"{info}top_level.txt").decode().split() == ["ctr_pe"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="compiled on Linux only")
def test_a_compiler_is_used_and_not_needed(checkout: Path, tmp_path: Path) -> None:
    source = copy_checkout(checkout, tmp_path / "source")

    def found(compiler: str) -> set[str]:
        out = tmp_path / compiler
        build(source, out, "--wheel", env={**os.environ, "CC": compiler})
        shutil.rmtree(source / "build")
        (wheel,) = out.glob("*.whl")
        return {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith((".so", ".c"))}

    assert found("no-such-compiler") == set()
    if shutil.which("cc") is not None:
        assert len(found("cc")) == 1


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="compiled on Linux only")
def test_one_wheel_of_a_release_fits_every_python_and_brings_no_library(released: Path, wheel: Path) -> None:
    """Above all no second OpenMP library: torch has one, whose threads the kernels take."""
    assert re.fullmatch(rf"ctr_pe-{re.escape(ctr_pe.__version__)}-cp311-abi3-manylinux[\w.]+\.whl", released.name)
    built, files = ({name for name in zipfile.ZipFile(one).namelist() if name[-1] != "/"} for one in (wheel, released))
    assert files == built
    assert [name for name in files if ".so" in name] == ["ctr_pe/ops/_kernels.abi3.so"]


def test_wheels_are_for_the_pythons_that_the_package_names(checkout: Path) -> None:
    setup = (checkout / "setup.py").read_text(encoding="utf-8")
    lowest, *_ = found = re.search(r"for minor in \((.*)\)", setup)[1].split(", ")
    settings = tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["cibuildwheel"]
    assert settings["build"] == [f"cp3{minor}-manylinux_x86_64" for minor in found]
    assert f'"py_limited_api": "cp3{lowest}"' in setup
    assert f'python_requires=">=3.{lowest}"' in setup
    for script in re.findall(r"\{project\}/(\S+)", settings["test-command"]):
        assert (checkout / script).is_file()


@pytest.mark.slow
def test_the_wheel_overwrites_no_file_of_fuxictr(wheel: Path) -> None:
    assert fuxictrs_modules()  # the trap is there
    assert not {str(file) for file in files("fuxictr") or []} & set(zipfile.ZipFile(wheel).namelist())


@pytest.mark.slow
def test_the_command_is_installed(wheel: Path) -> None:
    info = f"ctr_pe-{ctr_pe.__version__}.dist-info/"
    assert "ctr-pe = ctr_pe.cli:main" in zipfile.ZipFile(wheel).read(f"{info}entry_points.txt").decode()


def test_every_requirement_is_pinned_in_the_constraints(checkout: Path) -> None:
    lines = (checkout / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    assert (pins["torch"], pins["fuxictr"]) == ("2.13.0", "2.3.10")

    def normal(name: str) -> str:
        return re.sub("[-_.]+", "-", name).lower()

    needed = {normal(re.split("[^A-Za-z0-9._-]", line)[0]) for line in requires("ctr_pe") or []}
    assert needed <= {normal(name) for name in pins}


def test_the_citation_is_of_this_version(checkout: Path) -> None:
    cited = yaml.safe_load((checkout / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == ctr_pe.__version__
    assert cited.keys() >= {"cff-version", "message", "title", "authors"}
    assert cited["license"] in (checkout / "setup.py").read_text(encoding="utf-8")


def test_forms_for_issues_are_readable_and_ask_for_commands_that_exist(checkout: Path) -> None:
    parser = cli._parser()
    forms = [yaml.safe_load(file.read_text(encoding="utf-8")) for file in (checkout / ".github").rglob("*.yml")]
    asked = [form for form in forms if "body" in form]
    assert len(asked) == 3
    for form in asked:
        assert form.keys() >= {"name", "description", "body"}
        for field in form["body"]:
            assert field["type"] in ("textarea", "input", "checkboxes")
            for command in re.findall(r"`ctr-pe ([^`]*)`", field["attributes"].get("description", "")):
                parser.parse_args(command.split())


def test_the_public_api() -> None:
    assert set(ctr_pe.__all__) == {*PUBLIC, "__version__"}
    assert set(ctr_pe.__all__) <= set(dir(ctr_pe))
    for name in PUBLIC:
        assert getattr(ctr_pe, name) is not None
    with pytest.raises(AttributeError, match="build_pes"):
        _ = ctr_pe.build_pes


def test_top_level_folders_are_importable_inside_the_package() -> None:
    code = "import ctr_pe.configs, ctr_pe.model_zoo, sys; print('model_zoo' in sys.modules, 'config' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True, cwd="/").split() == ["False", "False"]


@pytest.mark.slow
def test_package_models_and_configs_come_from_one_checkout(checkout: Path, tmp_path: Path) -> None:
    """A second checkout that stands before an installed one, as a ``git worktree`` does."""
    second = copy_checkout(checkout, tmp_path / "second")
    code = (
        "import ctr_pe.model_zoo.din, ctr_pe.config.yaml, importlib.resources as r; "
        "print(ctr_pe.__file__, ctr_pe.model_zoo.__file__, ctr_pe.model_zoo.din.__file__, r.files('ctr_pe.configs'))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(second), os.environ["PYTHONPATH"]])}
    where = subprocess.check_output([sys.executable, "-c", code], text=True, cwd="/", env=environment)
    assert where.count(f"{second}{os.sep}ctr_pe{os.sep}") == 4, where


FUXICTRS_FOLDER = """
from importlib.metadata import distribution
from pathlib import Path
site = Path(distribution("fuxictr").locate_file("."))
print(*(file.relative_to(site).as_posix() for file in (site / "model_zoo").rglob("*.py")))
"""


@pytest.mark.slow
def test_the_wheel_works_in_a_fresh_environment_without_a_compiler(
    released: Path, checkout: Path, tmp_path: Path
) -> None:
    home = tmp_path / "venv"
    venv.create(home, with_pip=True)
    outside = {
        key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV", "CTR_PE_DATA", "CC")
    }
    outside["PATH"] = str(home / "bin")

    def run(*words: str | Path) -> str:
        command = [str(home / "bin" / "python"), *map(str, words)]
        how: dict[str, Any] = {
            "capture_output": True,
            "text": True,
            "cwd": tmp_path,
            "env": outside,
            "stdin": subprocess.DEVNULL,
        }
        ended = subprocess.run(command, check=False, **how)
        assert ended.returncode == 0, f"{command}\n{ended.stdout}\n{ended.stderr}"
        return ended.stdout

    pins = checkout / "constraints.txt"
    run("-m", "pip", "install", "-q", "--no-compile", "-c", pins, f"{released}[serve]")
    where = run("-c", "import ctr_pe.model_zoo, ctr_pe.configs as c; print(ctr_pe.__file__, c.__file__)")
    assert str(checkout) not in where
    assert set(run("-c", FUXICTRS_FOLDER).split()) == fuxictrs_modules()
    run("-P", checkout / ".ci" / "wheel.py", checkout / "README.md")
    assert len((tmp_path / "results" / "synthetic_context-heldout" / "results.jsonl").read_text().splitlines()) == 2
