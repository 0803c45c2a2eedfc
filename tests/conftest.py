"""Settings of every test: one thread of torch per worker, and no deadlines on a noisy machine."""

import torch
from hypothesis import settings

# Workers that share two cores and start two threads each spend their time waiting for one another.
torch.set_num_threads(1)

settings.register_profile("rtopk", deadline=None, derandomize=True)
settings.load_profile("rtopk")
