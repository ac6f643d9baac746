"""Makes din.json from FuxiCTR's own DIN: python -m tests.golden.make_din PATH/TO/FuxiCTR (a git checkout or bare)."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from tests.support.golden_model import HISTORY, PARAMS, TARGET, batch, feature_map, set_weights

CASES = [
    {"activation": activation, "softmax": softmax, "padded": padded}
    for activation in ("Dice", "ReLU")
    for softmax in (True, False)
    for padded in (False, True)
]


def main(checkout: str) -> None:
    def git(*args: str) -> str:
        return subprocess.run(["git", "-C", checkout, *args], check=True, capture_output=True, text=True).stdout

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "fuxictr_din.py"
        source.write_text(git("show", "HEAD:model_zoo/DIN/src/DIN.py"))
        spec = importlib.util.spec_from_file_location("fuxictr_din", source)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for case in CASES:
            model = module.DIN(
                feature_map(Path(folder)),
                din_target_field=[TARGET],
                din_sequence_field=[HISTORY],
                din_use_softmax=case["softmax"],
                attention_hidden_activations=case["activation"],
                **PARAMS,
            )
            set_weights(model)
            case["y_pred"] = model.eval()(batch(bool(case["padded"])))["y_pred"].view(-1).tolist()
    about = {
        "reference": "model_zoo/DIN/src/DIN.py of reczoo/FuxiCTR",
        "commit": git("rev-parse", "HEAD").strip(),
        "fuxictr": version("fuxictr"),
        "torch": version("torch"),
    }
    out = Path(__file__).with_name("din.json")
    out.write_text(json.dumps({"about": about, "cases": CASES}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
