"""Kernels in Triton, which ``../accelerator.py`` launches. Nothing else imports them: Triton need not be installed."""
