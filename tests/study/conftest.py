"""Makes ``fake_training`` importable here and in the worker processes, which get this process's path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
