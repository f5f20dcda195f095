"""One thread: the suite's matrices are tiny, and two busy threads are slower than one."""

import torch

torch.set_num_threads(1)
