"""The parts of `make gpu-check`, which `scripts/gpu_check.py` runs one by one."""
