"""One thread: the tests' models are tiny, and threads waiting for each other cost more than they bring."""

import torch

torch.set_num_threads(1)
