"""The parts of `make gpu-check`; `scripts/gpu_check.py` runs them one by one."""
