"""Tests and the scripts that borrow from them run on the CPU, also where there is a GPU: torch reads this once."""

import os

os.environ["CUDA_VISIBLE_DEVICES"] = ""
