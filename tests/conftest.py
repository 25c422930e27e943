"""One thread: the tests' models are tiny, and threads waiting for each other cost more than they bring.
The user's own drafters stay out of sight."""

import os
import tempfile

import torch

torch.set_num_threads(1)
os.environ["OUTRIDER_HOME"] = tempfile.mkdtemp(prefix="outrider-tests-")
