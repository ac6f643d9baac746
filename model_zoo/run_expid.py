"""python model_zoo/run_expid.py --config config --expid DIN_synthetic --gpu -1: one experiment of a FuxiCTR config."""

import sys

from ctr_pe.commands.run_expid import main

if __name__ == "__main__":
    sys.exit(main())
