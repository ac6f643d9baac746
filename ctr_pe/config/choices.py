"""Names that a config may use: losses, optimisers, activations, metrics.

FuxiCTR looks such names up in torch and runs unknown ones as code. Here each key has a fixed list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ctr_pe.evaluation.metrics import METRICS
from ctr_pe.utils.errors import UserError, nearest, quoted

OPTIMIZERS = "Adadelta Adafactor Adagrad Adam AdamW Adamax ASGD NAdam RAdam RMSprop Rprop SGD".split()
"""Those of torch that need only a learning rate."""
FUSED = ("Adagrad", "Adam", "AdamW", "SGD")
"""Those with a fused update of all parameters."""
FUSED_ON_CPU_ALONE = ("Adagrad",)
LOSSES = "bce binary_cross_entropy binary_crossentropy huber_loss l1_loss mse_loss smooth_l1_loss".split()
ACTIVATIONS = (
    "CELU Dice ELU GELU Hardshrink Hardsigmoid Hardswish Hardtanh Identity LeakyReLU LogSigmoid Mish PReLU ReLU ReLU6"
    " RReLU SELU Sigmoid SiLU Softmax Softplus Softshrink Softsign Tanh Tanhshrink".split()
)
CHOICES: dict[str, Sequence[str]] = {
    "activation": ACTIVATIONS,
    "learning_rate_schedule": ("constant", "linear", "cosine"),
    "loss": LOSSES,
    "metrics": METRICS,
    "monitor": METRICS,
    "monitor_mode": ("max", "min"),
    "optimizer": OPTIMIZERS,
    "table_optimizer": ("lazy_adam", "rowwise_adagrad"),
    "task": ("binary_classification",),
}


def choose(key: str, value: Any) -> Any:
    """The value of a key; activations and optimisers in torch's spelling (``sgd`` is ``SGD``).

    A value may be several names, as a list or as the keys of a mapping. Keys without a list take any value.

    Raises:
        UserError: a name that is not in the key's list, with the nearest one that is.
    """
    kind = "activation" if key.removesuffix("s").endswith("activation") else key
    if kind not in CHOICES or (value is None and kind in ("activation", "table_optimizer")):
        return value
    if isinstance(value, Mapping):
        return {choose(key, name): weight for name, weight in value.items()}
    if isinstance(value, (list, tuple)):
        return [choose(key, name) for name in value]
    found = [name for name in CHOICES[kind] if value == name]
    if kind in ("activation", "optimizer"):
        found += [name for name in CHOICES[kind] if str(value).lower() == name.lower()]
    if not found:
        raise UserError(f"{key} {quoted(value)} is unknown: {nearest(value, CHOICES[kind])}")
    return found[0]
