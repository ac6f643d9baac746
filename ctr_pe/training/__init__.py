"""The one way to train: ``train`` takes a model's name and a data set, ``fit`` a model that is there."""

from ctr_pe.training.divergence import Gradients
from ctr_pe.training.loop import Epoch, Fitted, fit
from ctr_pe.training.run import PROTOCOLS, Outcome, Run, build_model, train
from ctr_pe.training.scoring import evaluated, score
from ctr_pe.training.source import DataSource
from ctr_pe.training.steps import make_optimizer, train_step
from ctr_pe.training.weights import load, save

__all__ = [
    "PROTOCOLS",
    "DataSource",
    "Epoch",
    "Fitted",
    "Gradients",
    "Outcome",
    "Run",
    "build_model",
    "evaluated",
    "fit",
    "load",
    "make_optimizer",
    "save",
    "score",
    "train",
    "train_step",
]
