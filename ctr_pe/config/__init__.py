"""Configs: YAML, the keys and what is wrong with a value, validation."""

from ctr_pe.config.yaml import load_yaml

__all__ = ["load_yaml"]
